"""Run the notebook of one sweep on this site's records."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from analysis.notebooks import execute_notebook
from cluster.plan import telling

folder = Path(snakemake.output[0]).parent
with telling():
    execute_notebook(snakemake.wildcards.sweep, folder.parent / "records", folder)
