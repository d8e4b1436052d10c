"""`megafold cache build`, a part of it, or the merge after the parts, as a job of the site."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from cluster.plan import run_megafold, telling
from cluster.site import load_site

config, params = snakemake.config, snakemake.params
cache = Path(params.cache).resolve()
with telling():
    if params.part == "merge":
        run_megafold(config, "merge_cache", ["cache", "merge", cache])
    else:
        files = ["--data", Path(snakemake.input[0]).resolve(), "--out", cache]
        workers = max(snakemake.threads, load_site(config["site"]).cpus_per_task)
        limits = ["--workers", workers, "--msa-depth", params.msa_depth]
        part = ["--shard", params.part] if params.part else []
        name = f"build_cache_{params.part.replace('/', '_of_')}" if params.part else "build_cache"
        run_megafold(config, name, ["cache", "build", *files, *limits, *part])
