"""The real thing on a CPU: a training step of the smallest model, stock and with MegaFold, in two worker processes."""

from __future__ import annotations

from experiments.run import measure
from experiments.spec import load_sweep

SWEEP = """
what: iteration
model: tiny
dtype: [fp32, bf16]
shape: {n_tokens: 12, msa_depth: 4}
contenders: {eager: {}, megafold: {}}
protocol: {visits: 2, warmup: 1, repeats: 1, timeout_s: 600}
"""


def test_a_training_step_is_measured_for_the_stock_model_and_megafold(tmp_path):
    path = tmp_path / "smallest.yaml"
    path.write_text(SWEEP)
    records = measure(
        load_sweep(str(path)).comparisons,
        tmp_path / "records",
        cache=None,
        logs=tmp_path / "logs",
        command="test",
        device="cpu",
    )
    by_name = {(r.point.setting.dtype, r.point.contender.name): r for r in records}
    eager, megafold = by_name["fp32", "eager"], by_name["fp32", "megafold"]
    assert [(eager.status, eager.reason), (megafold.status, megafold.reason)] == [("ok", ""), ("ok", "")]
    for record in (eager, megafold):
        units = {name: metric.unit for name, metric in record.metrics.items()}
        times = ("iteration_time", "forward_time", "backward_time", "optimizer_time")
        assert {name: units[name] for name in times} == dict.fromkeys(times, "s")
        assert all(record.metrics[name].n == 2 for name in times)
        parts = sum(record.metrics[name].value for name in times[1:])
        assert 0.5 < parts / record.metrics["iteration_time"].value < 2
        assert units["peak_memory"] == units["persistent_memory"] == units["peak_above_persistent"] == "GiB"
        assert "resident" in record.metrics["peak_memory"].definition
        assert units["model_flops"] == units["hardware_flops"] == "FLOP"
        assert record.metrics["loss"].value > 0
        assert not {"mfu", "hfu", "loader_wait", "peak_memory_reserved"} & set(units)
        assert (record.vendor, record.provenance["tf32"]) == ("cpu", True)
        assert record.provenance["packages"]["alphafold3-pytorch"] == "0.8.3"
    assert eager.metrics["persistent_memory"] == megafold.metrics["persistent_memory"]
    assert eager.metrics["model_flops"] == megafold.metrics["model_flops"]
    assert eager.metrics["hardware_flops"].value > megafold.metrics["hardware_flops"].value
    for contender in ("eager", "megafold"):
        assert by_name["bf16", contender].status == "unsupported"
        assert "needs a GPU" in by_name["bf16", contender].reason
