"""Run the notebook of one sweep on this site's records."""

from pathlib import Path

from snakemake.script import snakemake

from analysis.notebooks import execute_notebook
from cluster.plan import telling

folder = Path(snakemake.output[0]).parent
with telling():
    execute_notebook(snakemake.wildcards.sweep, folder.parent / "records", folder)
