"""Host side of the Hopper kernels: which calls they serve, and how they are launched."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megafold import triton_support
from megafold.evoflash3d.hopper.bias import bias_kernel_sm90
from megafold.evoflash3d.hopper.forward import forward_kernel_sm90
from megafold.evoflash3d.hopper.keys import keys_kernel_sm90
from megafold.evoflash3d.hopper.queries import queries_kernel_sm90
from megafold.evoflash3d.hopper.rows import rows_kernel_sm90
from megafold.evoflash3d.launch import Problem, block_d
from megafold.gluon_descriptors import descriptor
from megafold.replay import launch_kernel


def launch_forward(problem: Problem, out: Tensor, lse: Tensor, natural_lse: bool, config: dict) -> None:
    """Fill `out` and `lse`. config: rows, block, stages, registers (of a thread that multiplies), programs_per_sm."""
    held, block = _held(config), config["block"]
    items, grid = _work(problem, problem.NQ, config)
    launch_kernel(
        forward_kernel_sm90, grid,
        **_inputs(problem, held, block),
        bias=_matrix(problem.bias, [held, block]), out=out, lse=lse, **problem.strides("o", out),
        NATURAL=natural_lse, SHARES=config.get("shares", False), pitch=lse.shape[-1],
        BIAS_ROWS=problem.bias.shape[2], items=items,
        BLOCK_I=held, BLOCK_J=block, ROWS=config["rows"], head_dim=problem.D, **_common(problem, config),
    )  # fmt: skip


def launch_queries(
    problem: Problem, gradients: dict[str, Tensor], dq: Tensor, config: dict, beside: bool = False
) -> None:
    """Fill dq; when `gradients` has "out", also its delta. beside: start before the kernel launched before ends."""
    held, block = _held(config), config["block"]
    items, grid = _work(problem, problem.NQ, config)
    own = "out" in gradients
    launch_kernel(
        queries_kernel_sm90, grid,
        **_inputs(problem, held, block),
        grad_out=_rows(problem, gradients["grad_out"], held), bias=_matrix(problem.bias, [held, block]),
        out=_rows(problem, gradients["out" if own else "grad_out"], held),
        OWN_DELTA=own, lse2=gradients["lse2"], delta=gradients["delta"], dq=dq, **problem.strides("dq", dq),
        BIAS_ROWS=problem.bias.shape[2], pitch=gradients["lse2"].shape[-1], items=items,
        BLOCK_I=held, BLOCK_J=block, ROWS=config["rows"], head_dim=problem.D,
        **_common(problem, config), **_overlap(config, beside),
    )  # fmt: skip


def launch_keys(
    problem: Problem, gradients: dict[str, Tensor], dk: Tensor, dv: Tensor, config: dict, beside: bool = False
) -> None:
    """Fill dk and dv. beside: as for `launch_queries`."""
    held, block = _held(config), config["block"]
    items, grid = _work(problem, problem.NK, config)
    launch_kernel(
        keys_kernel_sm90, grid,
        **_inputs(problem, block, held),
        grad_out=_rows(problem, gradients["grad_out"], block), bias=_matrix(problem.bias, [block, held]),
        **_both_statistics(problem, gradients, block),
        dk=dk, dv=dv, **problem.strides("dk", dk), **problem.strides("dv", dv),
        BIAS_ROWS=problem.bias.shape[2], items=items, BLOCK_I=block, BLOCK_J=held, ROWS=config["rows"],
        head_dim=problem.D, **_common(problem, config), **_overlap(config, beside),
    )  # fmt: skip


def launch_rows(
    problem: Problem,
    gradients: dict[str, Tensor],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    config: dict,
    beside: bool = False,
) -> None:
    """Fill dq, dk and dv. beside: as for `launch_queries`."""
    held, block = _held(config), config["block"]
    items = row_items(problem)
    launch_kernel(
        rows_kernel_sm90, _grid(problem, items, config),
        **_inputs(problem, held, block),
        grad_out=_rows(problem, gradients["grad_out"], held), bias=_matrix(problem.bias, [held, block]),
        **_both_statistics(problem, gradients, held), dq=dq, dk=dk, dv=dv,
        **problem.strides("dq", dq), **problem.strides("dk", dk), **problem.strides("dv", dv),
        R=problem.R, H=problem.H, NQ=problem.NQ, NK=problem.NK, BIAS_ROWS=problem.bias.shape[2],
        head_dim=problem.D, scale=problem.scale, items=items, D=block_d(problem.D), QUERIES=room_for(problem.NQ),
        STAGES=config["stages"], KEY_STAGES=config["key_stages"], SCORE_STAGES=config["score_stages"],
        REGISTERS=config["registers"], QUERY_REGISTERS=config["query_registers"],
        num_warps=config["warps"], **_overlap(config, beside),
    )  # fmt: skip


def row_items(problem: Problem) -> int:
    """Rows of all heads: what `launch_rows` deals out to its programs, whole."""
    return problem.B * problem.R * problem.H


def room_for(queries: int) -> int:
    """Queries that shared memory has room for: few different sizes, since each is a kernel of its own."""
    return triton.cdiv(queries, 256) * 256


def launch_bias(
    problem: Problem, gradients: dict[str, Tensor], partial: Tensor, rows_per_chunk: int, config: dict
) -> None:
    """Fill `partial` [chunks, B, H, NQ, NK] with sums over chunks of rows."""
    held, block = _held(config), config["block"]
    items = partial.shape[0] * bias_tiles(problem, config)
    launch_kernel(
        bias_kernel_sm90, _grid(problem, items, config),
        **_inputs(problem, held, block),
        grad_out=_rows(problem, gradients["grad_out"], held), **_both_statistics(problem, gradients, held),
        bias=problem.bias, dbias=partial, B=problem.B,
        BIAS_ROWS=problem.bias.shape[2], BIAS_COLUMNS=problem.bias.shape[3], rows_per_chunk=rows_per_chunk, items=items,
        BLOCK_I=held, BLOCK_J=block, **_common(problem, config), **_overlap(config, beside=False),
    )  # fmt: skip


def bias_tiles(problem: Problem, config: dict) -> int:
    """Tiles of d(bias)."""
    return triton.cdiv(problem.NQ, _held(config)) * triton.cdiv(problem.NK, config["block"]) * problem.B * problem.H


def _held(config: dict) -> int:
    """Queries (keys in `launch_keys`) of a row that a program holds."""
    return 16 * config["warps"] * config["parts"]


def _common(problem: Problem, config: dict) -> dict[str, object]:
    return {
        "R": problem.R, "H": problem.H, "NQ": problem.NQ, "NK": problem.NK, "scale": problem.scale,
        "STAGES": config["stages"], "STEP": config["step"], "REGISTERS": config["registers"], "WARPS": config["warps"],
        "PARTS": config["parts"], "D": block_d(problem.D),
        "num_warps": config["warps"],
    }  # fmt: skip


def _overlap(config: dict, beside: bool) -> dict[str, bool]:
    """OVERLAP: the table's "overlap", what a kernel does for its neighbours; launch_pdl: it need not wait to start."""
    overlap = config.get("overlap", False)
    return {"OVERLAP": overlap, "launch_pdl": overlap and beside}


def _work(problem: Problem, length: int, config: dict) -> tuple[int, tuple[int]]:
    rows = triton.cdiv(problem.R, config["rows"])
    items = triton.cdiv(length, _held(config)) * rows * problem.H * problem.B
    return items, _grid(problem, items, config)


def _grid(problem: Problem, items: int, config: dict) -> tuple[int]:
    """Programs stay and walk over the items, so that the next item is fetched while one is finished."""
    return (min(items, config["programs_per_sm"] * triton_support.multiprocessors(problem.q.device)),)


def _inputs(problem: Problem, rows: int, columns: int) -> dict[str, TensorDescriptor]:
    tensors = {"q": (problem.q, rows), "k": (problem.k, columns), "v": (problem.v, columns)}
    return {name: _rows(problem, tensor, block) for name, (tensor, block) in tensors.items()}


def _both_statistics(problem: Problem, gradients: dict[str, Tensor], block: int) -> dict[str, TensorDescriptor]:
    return {name: _statistics(problem, gradients[name], block) for name in ("lse2", "delta")}


def _rows(problem: Problem, tensor: Tensor, block: int) -> TensorDescriptor:
    """Of a [B, R, H, N, D] tensor; made once for all kernels of a call."""
    # The stride of an axis of size 1 may be anything in PyTorch; the copy engine wants a multiple of 16 bytes.
    strides = (*(s if size > 1 else 16 for size, s in zip(tensor.shape[:4], tensor.stride()[:4])), 1)
    return _once(problem, tensor, tuple(tensor.shape), strides, (1, 1, 1, block, block_d(tensor.shape[-1])))


def _matrix(bias: Tensor, block: list[int]) -> TensorDescriptor:
    columns = bias.shape[-1]
    return descriptor(bias, (bias.numel() // columns, columns), (columns, 1), tuple(block))


def _statistics(problem: Problem, tensor: Tensor, block: int) -> TensorDescriptor:
    pitch = tensor.shape[-1]
    return _once(problem, tensor, (tensor.numel() // pitch, problem.NQ), (pitch, 1), (1, block))


def _once(
    problem: Problem,
    tensor: Tensor,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    block: tuple[int, ...],
) -> TensorDescriptor:
    key = (tensor.data_ptr(), shape, strides, block)
    found = problem.hopper_descriptors.get(key)
    if found is None:
        found = problem.hopper_descriptors[key] = descriptor(tensor, shape, strides, block)
    return found
