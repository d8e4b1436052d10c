"""Download what the cache is built from (a compute node may have no network) and write down where it lies."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

import yaml

from cluster.plan import telling
from experiments.spec import read_yaml
from megafold.evopipe.sources import load_data_section, materialize

config, out = snakemake.config, Path(snakemake.output[0])
file = Path.cwd() / ("sample.yaml" if config["data"] == "sample" else config["data"])
with telling():
    section = {"sample": True} if config["data"] == "sample" else read_yaml(file).get("data")
    load_data_section(section, file)
    section = {"folder": config["download"], **section}
    for key in {"folder", "mmcif", "msa", "templates", "components", "kalign"} & set(section):
        section[key] = str((file.parent / Path(section[key]).expanduser()).resolve())
    materialize(load_data_section(section, file))
out.write_text(yaml.safe_dump({"data": section}))
