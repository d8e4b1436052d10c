"""Download what the cache is built from: the driver has a network, a compute node may have none."""

from pathlib import Path

from snakemake.script import snakemake

from cluster.plan import telling
from megafold.evopipe.sources import data_source, materialize

config = snakemake.config
with telling():
    data = None if config["data"] == "sample" else Path(config["data"])
    materialize(data_source(data, Path(config["download"])))
