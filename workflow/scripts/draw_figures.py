"""PNG and SVG of one sweep, and a list of what was drawn."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from analysis.figures import write_figures
from cluster.plan import telling
from experiments.record import read_records

listing = Path(snakemake.output[0])
with telling():
    drawn = write_figures(read_records(listing.parents[1] / "records"), snakemake.wildcards.sweep, listing.parent)
listing.write_text("".join(f"{path.name}\n" for path in drawn))
