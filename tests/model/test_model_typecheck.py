"""With alphafold3-pytorch's run-time type checks on, which a process decides when it imports the package."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
from alphafold3_pytorch.tensor_typing import should_typecheck
from megafold.model.optimize import optimize
from megafold.model.plan import Plan

assert should_typecheck
model, batch = helpers._make_model(), helpers._batch(9, 7, confidence=True)
try:
    model(**{**batch, "msa": batch["msa"][..., :5]})
except Exception as error:
    assert "jaxtyping" in type(error).__module__ or "beartype" in type(error).__module__, error
else:
    raise AssertionError("nothing was checked")
stock, exact = helpers._step(model, batch), helpers._step_in_float64(model, batch)
report = optimize(model, Plan(graphs=False))
print(helpers._beyond_budget(helpers._step(model, batch), stock, exact))
print(report.not_replaced)
"""


def test_loss_and_gradients_equal_the_stock_models_under_typecheck():
    conftest = os.path.join(os.path.dirname(__file__), "conftest.py")
    environment = os.environ | {"TYPECHECK": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, conftest], env=environment, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr[-3000:]
    beyond, missed = run.stdout.strip().splitlines()[-2:]
    assert beyond == "[]"
    assert "shared_conditioning: run-time type checks are on (TYPECHECK)" in missed
