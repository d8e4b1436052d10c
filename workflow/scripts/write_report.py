"""The self-contained HTML page of this site's results."""

import sys
from pathlib import Path

from snakemake.script import snakemake

from analysis.report import write_report
from cluster.plan import telling

page = Path(snakemake.output[0])
with telling():
    write_report(page.parent, page)
print(f"report: {page}", file=sys.stderr)
