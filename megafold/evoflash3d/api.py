"""`evoflash3d`: attention with an additive pair bias that all rows share; argument checks, dispatch and autograd.

Two PyTorch operators (`megafold::evoflash3d` and its backward) make it one node for autograd, torch.compile and CUDA
graph capture. Kernels run where Triton does; elsewhere the chunked reference computes the same function.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d import reference
from megafold.evoflash3d.statistics import statistics_pitch
from megafold.operators import define

MAX_HEAD_DIM = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*DTYPES, torch.float64)


def evoflash3d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    *,
    return_lse: bool = False,
    offsets: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q k^T + bias) v for every row, with one bias for all rows.

    AF3 algorithms 14 and 15 (triangle attention: R = N), 24 (attention with pair bias: R = 1, or R = the number of
    augmentations), MSA column attention (no bias), and their sharded forms (Nq != Nk, a slice of the rows).
    Strided views are read as they are. Under autocast q, k and v are cast to the autocast dtype.

    Args:
        q: [B, R, H, Nq, D], fp32, bf16 or fp16 (fp64 through the reference); D a multiple of 8, at most 128.
        k, v: [B, R, H, Nk, D] in the dtype of q.
        bias: [B, H, Nq, Nk], fp32 or the dtype of q. With bf16 inputs an fp32 bias is rounded to bf16 once.
        mask: [B, R, Nk] bool, True = keep. A query without a key gives 0 and zero gradients.
        scale: factor of q k^T; D ** -0.5 by default.
        dropout_p: probability with which a probability is dropped, 0 <= p < 1.
        seed: of the dropout: an int, or an int64 tensor with one element on the device of q (read when the kernel
            runs, so a captured graph can be given a new one). None draws one from the device's default generator.
        return_lse: also return the natural log-sum-exp, which merges shards of keys; it is differentiable.
        offsets: global index of the first (b, r, h, i, j) of this shard, so that dropout does not depend on sharding.

    Returns:
        [B, R, H, Nq, D] in the dtype and memory order of q; with `return_lse` also [B, R, H, Nq] in fp32.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward.
    """
    if torch.is_autocast_enabled(q.device.type) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        if bias is not None and bias.dtype not in (torch.float32, dtype):
            bias = bias.to(dtype)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check(q, k, v, bias, mask, scale, dropout_p, seed, offsets)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    seed = _seed_tensor(seed, q.device) if dropout_p else None
    out, lse = _forward_op(q, k, v, bias, mask, seed, scale, float(dropout_p), list(offsets), return_lse)
    return (out, lse) if return_lse else out


def uses_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether inputs of this device and dtype run in Triton kernels (False: the chunked reference)."""
    return dtype in DTYPES and triton_support.runs_kernels(device)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    offsets: list[int],
    natural_lse: bool,
) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp: natural, or (with kernels, for the backward alone) as the backward kernels read it."""
    if uses_kernels(q.device, q.dtype):
        from megafold.evoflash3d.forward import launch_forward

        return launch_forward(q, k, v, bias, mask, seed, scale, dropout_p, offsets, natural_lse)
    return reference.chunked_forward(q, k, v, bias, mask, seed, scale, dropout_p, offsets)


def _fake_forward(q, k, v, bias, mask, seed, scale, dropout_p, offsets, natural_lse):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    pitched = uses_kernels(q.device, q.dtype) and not natural_lse
    length = statistics_pitch(q.shape[3]) if pitched else q.shape[3]
    return torch.empty_like(q), q.new_empty((*q.shape[:3], length), dtype=wide)


def _gradients(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout_p: float,
    offsets: list[int],
    natural_lse: bool,
    needs_rows: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d(bias); a gradient that is not asked for may come back with no element."""
    if uses_kernels(q.device, q.dtype):
        from megafold.evoflash3d.gradients import launch_backward

        return launch_backward(
            grad_out, grad_lse, q, k, v, bias, mask, seed, out, lse, scale, dropout_p, offsets, natural_lse,
            needs_rows, needs_bias,
        )  # fmt: skip
    dq, dk, dv, dbias = reference.chunked_backward(
        grad_out, grad_lse, q, k, v, bias, mask, seed, out, scale, dropout_p, offsets
    )
    nothing = [q.new_empty(0) for _ in range(4)]
    if not needs_rows:
        dq, dk, dv = nothing[:3]
    return dq, dk, dv, dbias if needs_bias else nothing[3]


def _fake_gradients(
    grad_out, grad_lse, q, k, v, bias, mask, seed, out, lse, scale, dropout_p, offsets, natural_lse, needs_rows,
    needs_bias,
):  # fmt: skip
    rows = [torch.empty_like(t) if needs_rows else q.new_empty(0) for t in (q, k, v)]
    return (*rows, torch.empty_like(bias) if needs_bias else q.new_empty(0))


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, bias, mask, seed, ctx.scale, ctx.dropout_p, ctx.offsets, ctx.natural_lse = inputs
    ctx.save_for_backward(q, k, v, bias, mask, seed, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    q, k, v, bias, mask, seed, out, lse = ctx.saved_tensors
    needs = ctx.needs_input_grad
    needs_rows, needs_bias = any(needs[:3]), needs[3]
    if grad_out is None and grad_lse is None:
        return (None,) * 10
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    grads = _backward_op(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        bias,
        mask,
        seed,
        out,
        lse,
        ctx.scale,
        ctx.dropout_p,
        ctx.offsets,
        ctx.natural_lse,
        needs_rows,
        needs_bias,
    )
    return (*(g if need else None for g, need in zip(grads, needs)), *(None,) * 6)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? seed"
_OPTIONS = "float scale, float dropout_p, int[] offsets, bool natural_lse"
_backward_op = define(
    "evoflash3d_backward",
    f"(Tensor grad_out, Tensor? grad_lse, {_INPUTS}, Tensor out, Tensor lse, {_OPTIONS}, bool needs_rows, "
    "bool needs_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    "evoflash3d", f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake_forward, _backward, _setup_context
)


def _seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    if seed is None:
        return torch.randint(0, 2**62, (1,), device=device)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def _check(q, k, v, bias, mask, scale, dropout_p, seed, offsets) -> None:
    if q.dim() != 5:
        _refuse("q", f"has {q.dim()} dimensions, shape {list(q.shape)}", "[B, R, H, Nq, D]")
    batch, rows, heads, n_queries, head_dim = q.shape
    if q.dtype not in REFERENCE_DTYPES:
        _refuse("q", f"has dtype {q.dtype}", f"one of {[str(d) for d in REFERENCE_DTYPES]}")
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        _refuse("q", f"has head dim {head_dim}", f"a multiple of 8 from 8 to {MAX_HEAD_DIM}")
    if k.dim() != 5:
        _refuse("k", f"has {k.dim()} dimensions, shape {list(k.shape)}", "[B, R, H, Nk, D]")
    n_keys = k.shape[3]
    expected = {
        "k": (k, (batch, rows, heads, n_keys, head_dim), (q.dtype,)),
        "v": (v, (batch, rows, heads, n_keys, head_dim), (q.dtype,)),
        "bias": (bias, (batch, heads, n_queries, n_keys), tuple({torch.float32, q.dtype})),
        "mask": (mask, (batch, rows, n_keys), (torch.bool,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            _refuse(name, f"has shape {list(tensor.shape)}", f"{list(shape)} (no broadcasting)")
        if tensor.dtype not in dtypes:
            _refuse(name, f"has dtype {tensor.dtype}", " or ".join(sorted(str(d) for d in dtypes)))
        if tensor.device != q.device:
            _refuse(name, f"is on {tensor.device}", f"the device of q, {q.device}")
    if scale is not None and not math.isfinite(scale):
        _refuse("scale", f"is {scale}", "a finite number")
    if not 0.0 <= dropout_p < 1.0:
        _refuse("dropout_p", f"is {dropout_p}", "a probability from 0 up to, not including, 1")
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != q.device:
            _refuse(
                "seed",
                f"is a {seed.dtype} tensor of shape {list(seed.shape)} on {seed.device}",
                f"one int64 element on {q.device}",
            )
    elif seed is not None and not (isinstance(seed, int) and -(2**63) <= seed < 2**63):
        _refuse("seed", f"is {seed!r}", "None, a 64-bit integer or an int64 tensor with one element")
    if len(offsets) != 5 or any(o < 0 for o in offsets):
        _refuse("offsets", f"is {tuple(offsets)}", "five numbers from 0: (b, r, h, i, j)")


def _refuse(name: str, was: str, allowed: str) -> None:
    raise ValueError(f"evoflash3d: {name} {was}; allowed: {allowed}")
