"""`megafold verify` as a job of the site, on the device that will be measured."""

from pathlib import Path

from snakemake.script import snakemake

from cluster.plan import run_megafold, telling

with telling():
    run_megafold(snakemake.config, "verify_kernels", ["verify", "--out", Path(snakemake.output[0]).resolve()])
