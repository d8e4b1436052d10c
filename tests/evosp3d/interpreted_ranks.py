"""The triangle update on ranks through EvoFusion's kernels in Triton's interpreter; prints, as JSON, what is off.

A script and not a test: the interpreter must be chosen before the kernels are imported. `test_evosp3d_kernels.py` runs
it once in a process of its own.
"""

import copy
import json
import os
from functools import partial

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from conftest import _run_ranks
from torch.utils.checkpoint import checkpoint

from megafold import triton_support
from megafold.evofusion.triangle_multiplication.reference import triangle_multiplication
from megafold.evosp3d import sharded_triangle
from megafold.evosp3d.collectives import Gather, run
from megafold.evosp3d.mesh import Shards
from megafold.evosp3d.pair_block import folded, normalized, projected
from megafold.evosp3d.sharded_triangle import triangle_update

triton_support.runs_kernels = lambda device: True
# Eight pieces on two ranks, four on three, two on five.
sharded_triangle.PIECE_BYTES = sharded_triangle.PIECE_CHANNELS = 1

NAMES = ("norm_weight", "norm_bias", "in_weight", "gate_weight", "out_norm_weight", "out_norm_bias", "out_weight")
WIDTH = 16
# Name -> ranks, structures, tokens, outgoing, axis of dropout. The last of five ranks has no row of nine.
CASES = {
    "two ranks, outgoing, a padded row": (2, 1, 17, True, "row"),
    "three ranks, incoming, two structures": (3, 2, 5, False, "col"),
    "five ranks, one without rows, outgoing": (5, 1, 9, True, "col"),
    "one rank, incoming": (1, 1, 6, False, None),
}
FP32 = 2.0**-24


def _drawn(batch: int, tokens: int, axis: str | None) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    tensors = {"x": draw(batch, tokens, tokens, WIDTH)}
    for name in NAMES:
        shape = {"in_weight": (4 * WIDTH, WIDTH), "gate_weight": (WIDTH, WIDTH), "out_weight": (WIDTH, WIDTH)}
        tensors[name] = draw(*shape.get(name, (WIDTH,))) * (0.3 if name in shape else 1.0)
    tensors["cotangent"] = draw(batch, tokens, tokens, WIDTH)
    tensors["mask"] = torch.arange(tokens).expand(batch, tokens) < tokens - 2
    if axis is not None:
        shape = (batch, 1, tokens, WIDTH) if axis == "row" else (batch, tokens, 1, WIDTH)
        tensors["dropped"] = (draw(*shape) > 0).double() * 2
    return tensors


def _reference(tensors: dict[str, torch.Tensor], outgoing: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    given = {name: tensor.to(dtype, copy=True) for name, tensor in tensors.items() if name != "mask"}
    leaves = {name: given[name].requires_grad_() for name in ("x", *NAMES)}
    mask = tensors["mask"][:, :, None] & tensors["mask"][:, None, :]
    out = triangle_multiplication(*leaves.values(), outgoing, mask, given.get("dropped"))
    out.backward(given["cotangent"])
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def _on_rank(tensors: dict[str, torch.Tensor], outgoing: bool) -> dict[str, torch.Tensor]:
    import torch.distributed as dist

    shards, tokens = Shards(dist.group.WORLD), tensors["x"].shape[1]
    given = {name: tensor.float() for name, tensor in tensors.items() if name != "mask"}
    x = shards.narrow(given["x"], 1).clone().requires_grad_()
    weights = {name: given[name].requires_grad_() for name in NAMES}
    mask, dropped = tensors["mask"], given.get("dropped")
    keep = shards.narrow(mask, 1)[:, :, None] & mask[:, None, :]
    if dropped is not None and dropped.shape[1] > 1:
        dropped = shards.narrow(dropped, 1)
    update = partial(triangle_update, outgoing=outgoing, mask=keep, dropped=dropped, shards=shards)
    out = checkpoint(update, x, *weights.values(), use_reentrant=False)
    out.backward(shards.narrow(given["cotangent"], 1))
    whole = {"out": out.detach(), "x": x.grad}
    found = {name: run(Gather(1, tokens), value, shards, "") for name, value in whole.items()}
    return found | {name: weight.grad for name, weight in weights.items()}


def _off(ranks: list[dict[str, torch.Tensor]], eager, exact) -> list[str]:
    lines = []
    for name, value in exact.items():
        found = sum(rank[name] for rank in ranks) if name in NAMES else ranks[-1][name]
        scale = value.norm()
        error, allowed = (float((other - value).norm() / scale) for other in (found.double(), eager[name].double()))
        if not error <= 2 * allowed + 4 * FP32:
            lines.append(f"{name}: error {error:.1e}, eager {allowed:.1e}")
    return lines


def _normalised_and_projected() -> list[str]:
    """LayerNorm, sent without its scale and shift, and a projection that does both, of rows that lie apart."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norm, weight, bias = torch.nn.LayerNorm(32, dtype=torch.float64), draw(24, 32), draw(24)
    with torch.no_grad():
        norm.weight.copy_(draw(32)), norm.bias.copy_(draw(32))
    x, cotangent = draw(2, 5, 3, 32) * 3 + 1, draw(2, 3, 5, 24)

    def step(dtype: torch.dtype, fused: bool) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(norm).to(dtype)
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
        if fused:
            hat, scaled = normalized(given[0].transpose(1, 2), own)
            assert not scaled, "the kernel did not run"
            (out,) = projected(hat, *zip(folded(*given[1:], own)))
        else:
            out = F.linear(own(given[0].transpose(1, 2)), *given[1:])
        out.backward(cotangent.to(dtype))
        gradients = zip(("x", "weight", "bias", "scale", "shift"), (*given, own.weight, own.bias))
        return {"out": out.detach()} | {name: leaf.grad for name, leaf in gradients}

    exact, eager = step(torch.float64, False), step(torch.float32, False)
    empty = normalized(torch.zeros(1, 0, 4, 32, requires_grad=True), norm.float())[0]
    return _off([step(torch.float32, True)], eager, exact) + ["a row"] * empty.numel()


def main() -> None:
    results = {"normalised and projected": _normalised_and_projected()}
    for name, (ranks, batch, tokens, outgoing, axis) in CASES.items():
        tensors = _drawn(batch, tokens, axis)
        eager, exact = (_reference(tensors, outgoing, dtype) for dtype in (torch.float32, torch.float64))
        results[name] = _off(_run_ranks(ranks, _on_rank, tensors, outgoing), eager, exact)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
