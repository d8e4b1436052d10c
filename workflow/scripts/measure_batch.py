"""Measure one batch of comparisons as a job of the site; fails where a point has no result."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

import sys
from pathlib import Path

from cluster.batch import FAILING, Layout, measure_batch
from cluster.plan import megafold_command, telling
from cluster.site import load_site

config, params = snakemake.config, snakemake.params
site = load_site(config["site"])
with telling():
    records = measure_batch(
        site,
        Layout(Path(config["results"], site.name)),
        params.sweep,
        snakemake.wildcards.batch,
        params.comparisons,
        megafold_command(config),
        cache=Path(params.cache) if params.cache else None,
        force=config["force"],
    )
failed = [record for record in records if record.status in FAILING]
for record in failed:
    print(f"{record.status}: {record.point.id}: {record.reason}", file=sys.stderr)
sys.exit(bool(failed))
