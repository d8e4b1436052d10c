"""Launches and waits by the names of runtime calls; alignments that the model gives up."""

from __future__ import annotations

import pytest

from megafold.metrics import activity
from megafold.metrics.activity import Activity, alignment_failures, count_activity, counted


def test_calls_of_both_runtimes_are_counted_by_kind():
    calls = [
        ("cudaLaunchKernel", 5),
        ("cuLaunchKernelEx", 2),
        ("hipExtModuleLaunchKernel", 3),
        ("cudaGraphLaunch", 4),
        ("cudaStreamSynchronize", 6),
        ("hipDeviceSynchronize", 1),
        ("cudaMemcpyAsync", 9),
        ("aten::LaunchKernel", 100),
        ("ampere_bf16_gemm", 100),
    ]
    assert counted(calls) == Activity(launches=10, graphs=4, waits=7)


def test_a_step_on_a_cpu_has_none():
    import torch

    ran = []
    assert count_activity(lambda: ran.append(torch.ones(3).sum())) == Activity(0, 0, 0)
    assert len(ran) == 1


def test_names_are_counted_as_the_profilers_table_counts_them():
    import torch
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(4, 4)

    def work():
        (x @ x).relu().exp().relu()

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        work()
    expected = {event.key: event.count for event in found.key_averages()}
    names = activity.calls_by_name(work, [ProfilerActivity.CPU])
    assert {"aten::mm", "aten::relu", "aten::exp"} <= set(names)
    assert {name: names[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("calls", "expected", "runs"),
    [
        ([{"cudaLaunchKernel": 3, "gemm": 9}], Activity(3, 0, 0), 1),
        ([{"cudaGraphLaunch": 2}], Activity(0, 2, 0), 1),
        ([{"gemm": 9}, {"aten::mm": 9, "cuLaunchKernel": 4}], Activity(4, 0, 0), 2),
    ],
    ids=["device", "graphs", "operators-too"],
)
def test_operators_of_the_host_are_traced_only_where_no_launch_is_told_without_them(calls, expected, runs, monkeypatch):
    import torch
    from torch.profiler import ProfilerActivity

    cpu, device = ProfilerActivity.CPU, ProfilerActivity.CUDA
    asked = []

    def told(step, activities):
        asked.append(activities)
        return calls[len(asked) - 1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(activity, "calls_by_name", told)
    assert count_activity(lambda: None) == expected
    assert asked == [[device], [cpu, device]][:runs]


@pytest.mark.gpu
def test_launches_and_waits_of_a_device_are_counted_without_operators_of_the_host():
    import torch
    from torch.profiler import ProfilerActivity

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    x = torch.randn(64, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.relu()
    with torch.cuda.graph(graph):
        x.relu().relu()

    def work():
        for _ in range(5):
            x.relu()
        graph.replay()
        x.sum().item()

    names = activity.calls_by_name(work, [ProfilerActivity.CUDA])
    assert not any(name.startswith("aten::") for name in names)
    found = counted(names.items())
    assert (found.launches, found.graphs) == (6, 1) and found.waits >= 1
    assert count_activity(work) == counted(
        activity.calls_by_name(work, [ProfilerActivity.CPU, ProfilerActivity.CUDA]).items()
    )


def test_alignments_given_up_are_counted_until_the_end():
    from loguru import logger

    with alignment_failures() as failures:
        logger.warning("Skipping weighted rigid alignment due to: no reason")
        logger.warning("Skipping multi-chain permutation alignment for x.cif due to: no reason")
        logger.warning("Skipping breakfast")
        logger.info("Skipping weighted rigid alignment")
    logger.warning("Skipping weighted rigid alignment due to: too late")
    assert failures.value == 2
