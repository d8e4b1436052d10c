"""`megafold verify` as a job of the site, on the device that will be measured."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from cluster.plan import run_megafold, telling

with telling():
    run_megafold(
        snakemake.config,
        "verify_kernels",
        ["verify", "--out", Path(snakemake.output[0]).with_name("verify.json").resolve()],
    )
