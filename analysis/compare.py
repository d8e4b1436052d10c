"""The same points of two sites or two commits, side by side. Their numbers come from two jobs: a look, not a claim."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from experiments.record import Record

# What is compared for each kind of measurement, smaller being better.
QUANTITIES = {
    "iteration": ("iteration_time", "peak_memory"),
    "kernel": ("forward_backward_time", "forward_time", "peak_memory"),
    "data_pipeline": ("example_time",),
}


def compare_table(first: Sequence[Record], second: Sequence[Record], names: tuple[str, str]) -> pd.DataFrame:
    """One row for each point and quantity that at least one side has.

    Args:
        first, second: records of the two sides; matched by point id, which does not depend on the site.
        names: column names of the two sides.

    Returns:
        columns point, quantity, unit, the two sides (a number, or the status where there is none), and ratio
        (first / second, where both are numbers).
    """
    sides = [{record.point.id: record for record in records} for records in (first, second)]
    rows = []
    for point in sorted(set(sides[0]) | set(sides[1])):
        pair = [side.get(point) for side in sides]
        known = next(record for record in pair if record is not None)
        for quantity in QUANTITIES[known.point.setting.what]:
            metrics = [record.metrics.get(quantity) if record is not None else None for record in pair]
            if not any(metrics):
                continue
            values = [
                metric.value if metric else "absent" if record is None else record.status
                for metric, record in zip(metrics, pair)
            ]
            ratio = metrics[0].value / metrics[1].value if all(metrics) and metrics[1].value else None
            unit = next(metric.unit for metric in metrics if metric)
            row = {"point": point, "quantity": quantity, "unit": unit}
            rows.append({**row, names[0]: values[0], names[1]: values[1], "ratio": ratio})
    return pd.DataFrame(rows, columns=["point", "quantity", "unit", *names, "ratio"])


def compare_records(first: Sequence[Record], second: Sequence[Record], names: tuple[str, str]) -> str:
    """`compare_table` as text, for a terminal; says so where nothing matches."""
    table = compare_table(first, second, names)
    if table.empty:
        return "no point has a result on either side"
    return table.to_markdown(index=False, floatfmt=".4g")
