"""The trace of a step on two gloo processes: what is sent, what overlaps, and the trace itself."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys

import pytest

from megafold.metrics.overlap import overlap
from megafold.train.trace import spans_of, split_by_kind


def test_kernels_of_both_vendors_are_told_apart_and_copies_are_neither():
    names = ["ncclDevKernel_SendRecv(ncclDevKernelArgs)", "Memcpy HtoD", "forward_kernel", "rcclDevKernel", "Memset"]
    sends, computes = split_by_kind([(name, (i, i + 1)) for i, name in enumerate(names)])
    assert (sends, computes) == ([(0, 1), (3, 4)], [(2, 3)])


def test_short_kernels_long_after_1970_keep_their_nanoseconds():
    began = 1_796_036_400_123_456_789
    sends, computes = ([(began + first + 300 * i, 101) for i in range(1000)] for first in (0, 150))
    spans = spans_of([*sends, *computes])
    found = overlap(spans[:1000], spans[1000:])
    assert found.total == pytest.approx(999 * 300e-9 + 251e-9, rel=1e-9)
    assert [found.communication, found.computation] == pytest.approx([101e-6, 101e-6], rel=1e-9)
    assert found.hidden == pytest.approx(0, abs=1e-15)
    assert spans_of([]) == []


def test_every_rank_tells_what_it_sent_and_what_overlapped(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "megafold.train.trace", "--model", "tiny", "--n-tokens", "7", "--msa-depth", "4"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(line["rank"] for line in lines) == [0, 1]
    for line in lines:
        assert line["sent_bytes"]["triangle_multiplication"] > 0
        assert 0 < line["communication_s"] < line["total_s"]
        assert line["hidden_s"] <= min(line["communication_s"], line["computation_s"])
        text = gzip.decompress((tmp_path / f"rank{line['rank']}-n7.json.gz").read_bytes())
        names = {event["name"] for event in json.loads(text)["traceEvents"]}
        assert any(name.startswith("gloo:") for name in names)
