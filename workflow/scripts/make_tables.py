"""CSV and Markdown of one sweep; the readable table also goes to the terminal."""
# ruff: noqa: F821 (Snakemake puts `snakemake` into a script's globals)

from pathlib import Path

from analysis.tables import of_sweep, print_table, write_tables
from cluster.plan import telling
from experiments.record import read_records

folder, sweep = Path(snakemake.output[0]).parent, snakemake.wildcards.sweep
with telling():
    records = of_sweep(read_records(folder.parent / "records"), sweep)
    write_tables(records, sweep, folder)
    print(print_table(records))
