"""`megafold verify`: no time is reported for a kernel or a plan that gives wrong numbers on the device at hand."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from megafold.testing import CheckResult, relative_error
from megafold.train.ranks import device_of

# Stock and replaced computation are both fp32 (TF32 off) and differ by the order of sums alone: a few 1e-6 on a healthy
# device, and 1e-2 or more where something is wrong. The tests of megafold/model hold the strict budget against float64.
MODEL_TOLERANCE = 1e-4


def verify_device(device: str = "auto", *, out: Path | None = None) -> list[CheckResult]:
    """Check EvoFlash-3D and EvoFusion against float64, and every plan switch against the stock model, on one device.

    Args:
        device: "auto" (a GPU where there is one), "cpu" or "cuda".
        out: JSON file for the results; written even where a check fails.

    Raises:
        InputError: see `device_of`.
    """
    place = device_of(None, device)
    from megafold.evoflash3d.verify import verify as verify_evoflash3d
    from megafold.evofusion.verify import verify as verify_evofusion

    results = [*verify_evoflash3d(place), *verify_evofusion(place), *verify_plans(place)]
    if out is not None:
        name = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
        _write(out, {"device": name, "ok": all(r.ok for r in results), "checks": [asdict(r) for r in results]})
    return results


def verify_plans(device: torch.device) -> list[CheckResult]:
    """Loss and gradients of a small model: each switch of the plan alone, and all together, against the stock model."""
    from megafold.model.build import build_model, model_kwargs
    from megafold.model.optimize import optimize, restore
    from megafold.model.plan import Plan
    from megafold.train.synthetic import synthetic_batch

    torch.manual_seed(0)
    model = build_model("tiny").to(device).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():  # what starts at zero would hide everything before it
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    batch = synthetic_batch(24, msa_depth=8, seed=1, model_kwargs=model_kwargs("tiny"))
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    switches = list(Plan().as_dict())
    plans = {f"plan {name}": Plan(**{key: key == name for key in switches}) for name in switches}
    plans["plan with every switch"] = Plan(**dict.fromkeys(switches, True))
    allowed_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        stock = _loss_and_gradients(model, batch)
        results = []
        for name, plan in plans.items():
            optimize(model, plan)
            results.append(_compared(name, _loss_and_gradients(model, batch), stock))
            restore(model)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed_tf32
    return results


def _loss_and_gradients(model: torch.nn.Module, batch: dict) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    loss = model(**batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def _compared(name: str, found: dict[str, torch.Tensor], stock: dict[str, torch.Tensor]) -> CheckResult:
    if found.keys() != stock.keys():
        return CheckResult(name, False, f"other gradients than stock: {sorted(found.keys() ^ stock.keys())[:3]}")
    # Against the size of all gradients: a gradient that is zero but for rounding has no relative error of its own.
    whole = torch.stack([value.double().norm() for key, value in stock.items() if key != "loss"]).norm()
    errors = {key: ((found[key] - stock[key]).double().norm() / whole).item() for key in stock if key != "loss"}
    errors["loss"] = relative_error(found["loss"], stock["loss"])
    worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
    detail = f"largest error {errors[worst]:.1e} ({worst}), allowed {MODEL_TOLERANCE:.0e}"
    return CheckResult(name, errors[worst] <= MODEL_TOLERANCE, detail)


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as stream:
        json.dump(content, stream, indent=1)
    os.replace(temporary, path)
