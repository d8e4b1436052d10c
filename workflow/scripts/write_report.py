"""The self-contained HTML page of this site's results."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

import sys
from pathlib import Path

from analysis.report import write_report
from cluster.plan import telling

page = Path(snakemake.output[0])
with telling():
    write_report(page.parent, page)
print(f"report: {page}", file=sys.stderr)
