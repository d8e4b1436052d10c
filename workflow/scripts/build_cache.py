"""`megafold cache build` as a job of the site."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from cluster.plan import run_megafold, telling
from cluster.site import load_site

config = snakemake.config
with telling():
    files = ["--data", Path(snakemake.input[0]).resolve(), "--out", Path(snakemake.output[0]).with_suffix("").resolve()]
    workers = max(snakemake.threads, load_site(config["site"]).cpus_per_task)
    limits = ["--workers", workers, "--msa-depth", snakemake.params.msa_depth]
    run_megafold(config, "build_cache", ["cache", "build", *files, *limits])
