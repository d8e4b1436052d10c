"""Launches and waits by the names of runtime calls; alignments that the model gives up."""

from __future__ import annotations

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


def test_alignments_given_up_are_counted_until_the_end():
    from loguru import logger

    with alignment_failures() as failures:
        logger.warning("Skipping weighted rigid alignment due to: no reason")
        logger.warning("Skipping multi-chain permutation alignment for x.cif due to: no reason")
        logger.warning("Skipping breakfast")
        logger.info("Skipping weighted rigid alignment")
    logger.warning("Skipping weighted rigid alignment due to: too late")
    assert failures.value == 2
