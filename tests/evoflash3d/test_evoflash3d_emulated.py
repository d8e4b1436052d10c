"""The Hopper kernels without a device: their source run with NumPy in the place of Gluon, against float64.

Fewer programs than items and more tiles than buffers: whoever counts or waits in a wrong order is found here.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from megafold.evoflash3d.hopper import bias, common, forward, keys, queries, rows
from megafold.evoflash3d.launch import PADDING
from tests.gluon_emulator import Descriptor, Emulator, Pointer

D, SCALE, LOG2E = 32, 32**-0.5, 1.4426950408889634
EMULATORS = {module: Emulator(common, module) for module in (bias, forward, keys, queries, rows)}


class Call:
    """Inputs of a backward pass [B, R, H, N, D], what the forward leaves for it, and exact gradients."""

    def __init__(self, batch, rows, heads, n_queries, n_keys) -> None:
        self.shape = batch, rows, heads, n_queries, n_keys
        generator = torch.Generator().manual_seed(0)
        self.q, self.g = (torch.randn(batch, rows, heads, n_queries, D, generator=generator) for _ in range(2))
        self.k, self.v = (torch.randn(batch, rows, heads, n_keys, D, generator=generator) for _ in range(2))
        pair_bias = torch.randn(batch, heads, n_queries, n_keys, generator=generator)
        pair_bias[..., :1, :] = float("-inf")  # a query that sees no key
        leaves = [t.double().requires_grad_() for t in (self.q, self.k, self.v, pair_bias)]
        scores = leaves[0] @ leaves[1].mT * SCALE + leaves[3][:, None]
        seen = torch.isfinite(scores)
        p = torch.softmax(scores.where(seen, torch.tensor(-1e300, dtype=torch.double)), -1) * seen
        out = p @ leaves[2]
        self.exact = dict(zip(("dq", "dk", "dv", "dbias"), torch.autograd.grad(out, leaves, self.g.double())))
        self.exact["out"] = out.detach()
        lse = torch.logsumexp(scores.detach(), -1) * LOG2E
        self.pitch = -(-n_queries // 32) * 32
        self.lse2, self.delta = (torch.full((batch, rows, heads, self.pitch), float("nan")) for _ in range(2))
        self.lse2[..., :n_queries] = lse.where(torch.isfinite(lse), torch.tensor(float("inf"), dtype=torch.double))
        self.delta[..., :n_queries] = (out.detach() * self.g).sum(-1)
        padded = [-(-n // PADDING) * PADDING for n in (n_queries, n_keys)]
        self.bias = torch.zeros(batch, heads, *padded)
        self.bias[..., n_keys:] = float("-inf")
        self.bias[..., :n_queries, :n_keys] = pair_bias
        self.found = {name: torch.full_like(t, float("nan")) for name, t in (("dq", self.q), ("dk", self.k))}
        self.found["dv"] = torch.full_like(self.v, float("nan"))

    def descriptor(self, tensor, block):
        return Descriptor(tensor.numpy(), tensor.shape, tensor.stride(), (1, 1, 1, block, D))

    def arguments(self, held, passing, outputs):
        """What all of these kernels take, for tiles of `held` queries and `passing` keys."""
        batch, n_rows, heads, n_queries, n_keys = self.shape
        lines = batch * n_rows * heads
        given = {
            "q": self.descriptor(self.q, held), "grad_out": self.descriptor(self.g, held),
            "k": self.descriptor(self.k, passing), "v": self.descriptor(self.v, passing),
            "bias": Descriptor(self.bias.numpy(), (self.bias.numel() // self.bias.shape[-1], self.bias.shape[-1]),
                               (self.bias.shape[-1], 1), (held, passing)),
            "R": n_rows, "H": heads, "NQ": n_queries, "NK": n_keys, "BIAS_ROWS": self.bias.shape[2],
            "scale": SCALE, "head_dim": D, "D": D, "REGISTERS": 0, "OVERLAP": False,
        }  # fmt: skip
        for name in ("lse2", "delta"):
            flat = getattr(self, name).numpy().reshape(lines, self.pitch)
            given[name] = Descriptor(flat, (lines, n_queries), (self.pitch, 1), (1, held))
        for name in outputs:
            given[name] = Pointer(self.found[name].numpy().reshape(-1))
            given |= dict(zip((f"{name}_b", f"{name}_r", f"{name}_h", f"{name}_n"), self.found[name].stride()[:4]))
        return given

    def check(self, *outputs):
        for name in outputs:
            error = (self.found[name].double() - self.exact[name]).norm() / self.exact[name].norm()
            assert error < 1e-5, (name, error.item())


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("shape", [(1, 5, 1, 256, 256), (2, 2, 2, 70, 150), (1, 3, 1, 200, 300)], ids=str)
def test_whole_rows(shape, stages):
    call = Call(*shape)
    EMULATORS[rows].launch(
        rows.rows_kernel_sm90, 2, **call.arguments(64, 128, ("dq", "dk", "dv")), items=shape[0] * shape[1] * shape[2],
        QUERIES=256, STAGES=stages, KEY_STAGES=2, SCORE_STAGES=stages - 1, QUERY_REGISTERS=0,
    )  # fmt: skip
    call.check("dq", "dk", "dv")


@pytest.mark.parametrize(("n_rows", "parts"), [(1, 2), (2, 1), (2, 2)])
def test_keys(n_rows, parts):
    call = Call(1, 3, 2, 200, 150)
    given = call.arguments(64, 64 * parts, ("dk", "dv"))
    items = -(-150 // (64 * parts)) * -(-3 // n_rows) * 2
    EMULATORS[keys].launch(
        keys.keys_kernel_sm90, 2, **given, items=items, ROWS=n_rows, BLOCK_I=64, BLOCK_J=64 * parts, STAGES=3, STEP=32,
        WARPS=4, PARTS=parts,
    )  # fmt: skip
    call.check("dk", "dv")


@pytest.mark.parametrize("own_delta", [False, True], ids=["delta given", "own delta"])
@pytest.mark.parametrize(("n_rows", "parts"), [(1, 2), (2, 1)])
def test_queries(n_rows, parts, own_delta):
    call = Call(1, 3, 2, 200, 150)
    given = call.arguments(64 * parts, 64, ("dq",))
    p = [t.double() for t in (call.q, call.k, call.v, call.bias[..., :200, :150])]
    out = torch.softmax(p[0] @ p[1].mT * SCALE + p[3][:, None], -1).nan_to_num() @ p[2]
    delta, call.delta = call.delta, torch.full_like(call.delta, float("nan")) if own_delta else call.delta
    given |= {name: Pointer(getattr(call, name).numpy().reshape(-1)) for name in ("lse2", "delta")}
    items = -(-200 // (64 * parts)) * -(-3 // n_rows) * 2
    EMULATORS[queries].launch(
        queries.queries_kernel_sm90, 2, **given, out=call.descriptor(out.float().contiguous(), 64 * parts), items=items,
        pitch=call.pitch, ROWS=n_rows, BLOCK_I=64 * parts, BLOCK_J=64, STAGES=3, STEP=32, WARPS=4, PARTS=parts,
        OWN_DELTA=own_delta,
    )  # fmt: skip
    call.check("dq")
    assert torch.allclose(call.delta, delta, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(("parts", "step", "stages"), [(2, 64, 3), (1, 32, 2)])
@pytest.mark.parametrize("rows_per_chunk", [3, 5])
def test_bias(parts, step, stages, rows_per_chunk):
    call = Call(2, 5, 2, 200, 150)
    given = call.arguments(64 * parts, 64, ())
    chunks = -(-5 // rows_per_chunk)
    found = torch.full((chunks, 2, 2, 200, 150), float("nan"))
    items = chunks * -(-200 // (64 * parts)) * -(-150 // 64) * 4
    given |= {"bias": Pointer(call.bias.numpy().reshape(-1)), "dbias": Pointer(found.numpy().reshape(-1))}
    given = {name: value for name, value in given.items() if name != "head_dim"}
    EMULATORS[bias].launch(
        bias.bias_kernel_sm90, 2, **given, B=2, BIAS_COLUMNS=call.bias.shape[-1], rows_per_chunk=rows_per_chunk,
        items=items, BLOCK_I=64 * parts, BLOCK_J=64, STAGES=stages, STEP=step, WARPS=4, PARTS=parts,
    )  # fmt: skip
    call.found["dbias"] = found.sum(0)
    call.check("dbias")


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("shares", [False, True], ids=["sums of rows", "sums of threads"])
@pytest.mark.parametrize(("n_rows", "parts"), [(1, 2), (2, 1)])
def test_forward(n_rows, parts, shares):
    call = Call(1, 3, 2, 200, 150)
    call.found["out"], lse = torch.full_like(call.q, float("nan")), torch.full_like(call.lse2, float("nan"))
    given = call.arguments(64 * parts, 64, ("out",))
    given |= {f"o_{axis}": given.pop(f"out_{axis}") for axis in "brhn"} | {"lse": Pointer(lse.numpy().reshape(-1))}
    given = {name: value for name, value in given.items() if name not in ("grad_out", "lse2", "delta", "OVERLAP")}
    items = -(-200 // (64 * parts)) * -(-3 // n_rows) * 2
    EMULATORS[forward].launch(
        forward.forward_kernel_sm90, 2, **given, items=items, pitch=call.pitch, ROWS=n_rows, BLOCK_I=64 * parts,
        BLOCK_J=64, STAGES=3, STEP=64, WARPS=4, PARTS=parts, NATURAL=False, SHARES=shares,
    )  # fmt: skip
    call.check("out")
    assert torch.allclose(lse, call.lse2, atol=1e-4, equal_nan=True)
