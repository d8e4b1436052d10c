"""Download what the cache is built from: the driver has a network, a compute node may have none."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from cluster.plan import telling
from megafold.evopipe.sources import data_source, materialize

config = snakemake.config
with telling():
    data = None if config["data"] == "sample" else Path(config["data"])
    materialize(data_source(data, Path(config["download"])))
