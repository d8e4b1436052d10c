"""A structure shared by two ranks on two nodes, started by srun through the launcher."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cluster.batch import Layout, measure_batch
from cluster.site import load_site
from experiments.spec import load_sweep

pytestmark = pytest.mark.slurm
SETTINGS = ("model=tiny", "n_tokens=9", "msa_depth=3", "atoms_per_token=3", "sp=2")


def test_a_point_of_two_ranks_over_two_nodes(slurm, tmp_path):
    settings = [*SETTINGS, "visits=1", "warmup=0", "repeats=1", "timeout_s=200"]
    (comparison,) = load_sweep("sequence_parallel", size="demo", settings=settings).comparisons
    site, megafold = load_site("slurm-test"), [sys.executable, "-m", "megafold"]
    contents = [comparison.as_dict()]
    (record,) = measure_batch(site, Layout(tmp_path), "sequence_parallel", "two-nodes", contents, megafold)
    logs = "\n".join(path.read_text() for path in Path(tmp_path).rglob("*log*") if path.is_file())
    assert (record.status, record.reason) == ("ok", ""), logs[-4000:]
    assert record.provenance["slurm_job_id"]
    assert record.metrics["sent_all_to_all"].value > 0
    ends = sorted(path.read_text() for path in Path(tmp_path).rglob("*_end.json"))
    assert len(ends) == 2 and all('"exit_code": 0' in end for end in ends)
