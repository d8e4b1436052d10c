"""Parity of real ranks with one device: `torchrun --nproc-per-node P -m megafold.train.parity`.

Every way to write the number of ranks as dp x sp is tried, in float32 and, on GPUs, under bfloat16 autocast, dropout
off, over the stock code and with EvoFlash-3D and EvoFusion. Each rank computes the reference itself, once for all
splits: in float32 through the stock code, and the stock code's error under the same autocast, which the parallel run
may double.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafold.evosp3d.mesh import make_mesh
from megafold.evosp3d.parallelize import parallelize
from megafold.evosp3d.reduce import GradientReducer
from megafold.model.build import build_model, model_kwargs
from megafold.model.optimize import optimize
from megafold.model.plan import Plan
from megafold.train.ranks import device_of, find_place, joined
from megafold.train.synthetic import synthetic_batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# What rounding may add to twice the stock error, relative to the largest gradient of the module: the reference is no
# more exact than float32, and a sum over thousands of pairs in another order differs by some hundred roundings.
ROUNDING = {torch.float32: 512 * torch.finfo(torch.float32).eps, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}


PLANS = {"stock": None, "megafold": Plan()}


def check(
    model: nn.Module, batches: Mapping[int, Mapping[str, Any]], sp: int, autocast: bool, plan: Plan | None = None
) -> list[str]:
    """Gradients that are off by more than the budget, as lines; one batch a replica, the same on all ranks.

    ``plan``: what the ranks compute through (None: the stock code). Must be called by all ranks of the process group.
    """
    dp = dist.get_world_size() // sp
    mesh = make_mesh(dp, sp, next(model.parameters()).device.type)
    return against(OneDevice(model, batches).gradients(dp, autocast), model, batches, mesh, autocast, plan)


class OneDevice:
    """What one device computes of the batches of replicas 0, 1, ..., each computed when it is asked for, once."""

    def __init__(self, model: nn.Module, batches: Mapping[int, Mapping[str, Any]]) -> None:
        self._model, self._batches = model, batches
        self._found: dict[tuple[int, bool], dict[str, Tensor]] = {}

    def gradients(self, dp: int, autocast: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Means over ``dp`` batches by name: in float32 through the stock code, and what it gives under autocast."""
        exact = _mean([self._of(replica, False) for replica in range(dp)])
        return exact, _mean([self._of(replica, True) for replica in range(dp)]) if autocast else exact

    def _of(self, replica: int, autocast: bool) -> dict[str, Tensor]:
        key = replica, autocast
        if key not in self._found:
            device = next(self._model.parameters()).device
            self._found[key] = _gradients(self._model, self._batches[replica], replica, device, autocast)
            self._model.zero_grad(set_to_none=True)
        return self._found[key]


def against(
    references: tuple[dict[str, Tensor], dict[str, Tensor]],
    model: nn.Module,
    batches: Mapping[int, Mapping[str, Any]],
    mesh: DeviceMesh,
    autocast: bool,
    plan: Plan | None,
) -> list[str]:
    """As :func:`check`, with what :meth:`OneDevice.gradients` gave, over the mesh of a split."""
    device, dp = next(model.parameters()).device, mesh.size(0)
    exact, stock = references
    parallel = copy.deepcopy(model)
    if plan is not None:
        optimize(parallel, plan)
    parallelize(parallel, mesh, plan)
    reducer = GradientReducer(parallel.parameters(), dp=dp)
    replica = mesh.get_local_rank("dp")
    found = _gradients(parallel, batches[replica], replica, device, autocast, reducer)
    reducer.remove()
    return list(_beyond(found, stock, exact, torch.bfloat16 if autocast else torch.float32))


def without_silence(model: nn.Module) -> nn.Module:
    """The model without dropout, and with random numbers in what starts at zero and would hide what is before it."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.unique().numel() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _gradients(
    model: nn.Module,
    batch: Mapping[str, Any],
    seed: int,
    device: torch.device,
    autocast: bool,
    reducer: GradientReducer | None = None,
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with torch.autocast(device.type, dtype=torch.bfloat16) if autocast else nullcontext():
        loss = model(**batch)
    loss.backward()
    if reducer is not None:
        reducer.finish()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def _mean(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}


def _beyond(
    found: Mapping[str, Tensor], stock: Mapping[str, Tensor], exact: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[str]:
    if found.keys() != exact.keys():
        yield f"other parameters have gradients: {sorted(found.keys() ^ exact.keys())[:3]}"
        return
    scales: dict[str, float] = {}
    for name, gradient in exact.items():
        module = name.rpartition(".")[0]
        scales[module] = max(scales.get(module, 0.0), gradient.norm().item())
    rounding = ROUNDING[dtype]
    for name, gradient in exact.items():
        if name == "loss":  # of one replica here, of all there
            continue
        scale = max(scales[name.rpartition(".")[0]], 1e-30)
        error, allowed = ((other[name] - gradient).norm().item() / scale for other in (found, stock))
        if not error <= 2 * allowed + rounding:
            yield f"{name}: error {error:.1e}, stock {allowed:.1e}, allowed {2 * allowed + rounding:.1e}"


def main() -> int:
    """Entry point on every rank; rank 0 prints a line for each split, and the exit code is 1 if one is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--n-tokens", type=int, default=50)
    parser.add_argument("--overrides", type=json.loads, default={}, help="of the model's arguments, as JSON")
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--sp", nargs="+", type=int, help="splits to check, by default all")
    given = parser.parse_args()
    place = find_place()
    if place is None:
        parser.error("start several ranks with torchrun or srun")
    device = device_of(place, "auto")
    splits = [sp for sp in range(1, place.size + 1) if place.size % sp == 0]
    if given.sp is not None and not set(given.sp) <= set(splits):
        parser.error(f"argument --sp: is {given.sp}; {place.size} ranks can be split into {splits}")
    failed, began = 0, time.perf_counter()
    with joined(place, device, timeout_s=600):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.manual_seed(0)
        model = without_silence(build_model(given.model, **given.overrides).to(device).train())
        kwargs = model_kwargs(given.model, **given.overrides)
        batches = {}
        for replica in range(place.size):
            batch = synthetic_batch(given.n_tokens, msa_depth=16, seed=replica, model_kwargs=kwargs)
            batches[replica] = {name: tensor.to(device) for name, tensor in batch.items()}
        alone = OneDevice(model, batches)
        meshes = {sp: make_mesh(place.size // sp, sp, device.type) for sp in given.sp or splits}
        for dtype, sp in product(given.dtypes if device.type == "cuda" else ("fp32",), meshes):
            references = alone.gradients(place.size // sp, dtype == "bf16")
            for name in given.plans:
                lines = against(references, model, batches, meshes[sp], dtype == "bf16", PLANS[name])
                failed |= bool(lines)
                if place.rank == 0:
                    what = f"dp {place.size // sp} x sp {sp}, {dtype}, {name}"
                    after = f"({time.perf_counter() - began:.0f} s after the start)"
                    print(f"{what}: {'ok' if not lines else '; '.join(lines[:3])} {after}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
