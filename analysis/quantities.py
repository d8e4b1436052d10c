"""Names, units and roles of the metrics in records: which is a time, which a memory, and which leads a table."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.record import Metric, Record

# Factor from each unit to the base of its kind (seconds, bytes, one).
UNITS: dict[str, dict[str, float]] = {
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "memory": {
        "B": 1.0, "bytes": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9,
    },
    "fraction": {"fraction": 1.0, "percent": 1e-2, "%": 1e-2},
}  # fmt: skip
# The metric that a sweep's speed-up is about, and the further times that get a speed-up of their own.
LEADING_TIME = {"iteration": "iteration_time", "kernel": "forward_backward_time", "data_pipeline": "example_time"}
FURTHER_TIMES = {"iteration": (), "kernel": ("forward_time",), "data_pipeline": ()}
LEADING_MEMORY = ("peak_memory", "peak_allocated", "peak_rss")
SYNONYMS = {
    "step_time": "iteration_time",
    "forward": "forward_time",
    "forward_backward": "forward_backward_time",
    "seconds_per_example": "example_time",
    "time_per_example": "example_time",
    "read_time": "example_time",
    "peak_memory_reserved": "peak_reserved",
}
LABELS = {
    "iteration_time": "Training step",
    "forward_time": "Forward",
    "forward_backward_time": "Forward + backward",
    "example_time": "One example",
    "loader_wait": "Loader wait",
    "peak_allocated": "Peak memory",
    "peak_memory": "Peak memory",
    "peak_rss": "Peak memory",
    "peak_reserved": "Reserved",
    "peak_above_persistent": "Above weights, gradients, optimizer",
    "mfu": "MFU",
    "hfu": "HFU",
}
BASELINES = {"iteration": "eager", "kernel": "eager", "data_pipeline": "stock"}


@dataclass(frozen=True)
class Quantity:
    """One metric as a table shows it: `name` (canonical), `kind` ("time", "memory", "fraction", "other") and `unit`."""

    name: str
    kind: str
    unit: str

    @property
    def column(self) -> str:
        """Column of the median, the unit last: "iteration_time_s", "peak_memory_GiB", "mfu_percent"."""
        return f"{self.name}_{self.unit}" if self.unit else self.name

    def bound(self, which: str) -> str:
        """Column of a percentile ("p20", "p80"): "iteration_time_p20_s"."""
        return f"{self.name}_{which}_{self.unit}" if self.unit else f"{self.name}_{which}"

    @property
    def label(self) -> str:
        """Readable name, without the unit."""
        return LABELS.get(self.name, self.name.replace("_", " ").capitalize())


def quantity(name: str, unit: str, what: str) -> Quantity:
    """How the metric `name`, recorded in `unit` by a measurement of kind `what`, is shown.

    Times become ms and memories MiB for kernels, s and GiB elsewhere; fractions become percent; any other unit is kept.
    """
    name = SYNONYMS.get(name, name)
    kind = next((kind for kind, units in UNITS.items() if unit in units), "other")
    if kind == "time":
        return Quantity(name, kind, "ms" if what == "kernel" else "s")
    if kind == "memory":
        return Quantity(name, kind, "MiB" if what == "kernel" else "GiB")
    if kind == "fraction":
        return Quantity(name, kind, "percent")
    unit = "" if unit == "1" else unit
    return Quantity(name, kind, unit.replace("/", "_per_").replace(" ", "_"))


def scale(unit: str, wanted: Quantity) -> float:
    """Factor that turns a number in `unit` into `wanted.unit`."""
    units = UNITS.get(wanted.kind)
    return 1.0 if units is None else units[unit] / units[wanted.unit]


def shown(record: Record) -> dict[Quantity, Metric]:
    """The metrics of a record by Quantity, in the units of the tables."""
    found = {}
    for name, metric in record.metrics.items():
        wanted = quantity(name, metric.unit, record.point.setting.what)
        factor = scale(metric.unit, wanted)
        bounds = [None if bound is None else bound * factor for bound in (metric.p20, metric.p80)]
        found[wanted] = Metric(metric.value * factor, wanted.unit, *bounds, n=metric.n, definition=metric.definition)
    return found


def leading_memory(names: set[str]) -> str | None:
    """The memory that ratios and figures are about: allocated on a device, resident set on a CPU."""
    return next((name for name in LEADING_MEMORY if name in names), None)


def is_baseline(record: Record) -> bool:
    """Whether the record's contender is what the others of its comparison are divided by (`eager`, `stock`)."""
    return record.point.contender.name == BASELINES[record.point.setting.what]


def length(record: Record) -> int:
    """Tokens N of the record's shape (crop size for the data pipeline)."""
    shape = dict(record.point.setting.shape)
    return shape["n_tokens"] if "n_tokens" in shape else shape["crop_size"]
