"""What all kernels of one call share on the host: prepared inputs, strides, sizes and the launch configuration."""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megafold import triton_support
from megafold.evoflash3d.dropout import keep_threshold

PADDING = 128
"""Largest tile: a bias padded to multiples of it is read without bounds."""

LENGTH_BUCKETS = (128, 256, 512, 1024)
"""A table has an entry for lengths up to each of these, and "longer"."""


class Problem:
    """The inputs of one call as kernels take them.

    q, k, v and the mask are used through their strides (copied only when the last dimension is not contiguous). The
    bias, which every row reads, is made contiguous, padded to whole tiles, and bf16 when q is. A mask that is the same
    for all rows, as in triangle attention, goes into the bias, so that the kernels need not look at it.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        scale: float,
        dropout_p: float,
        offsets: list[int],
    ) -> None:
        self.q, self.k, self.v = (last_contiguous(t) for t in (q, k, v))
        self.B, self.R, self.H, self.NQ, self.D = q.shape
        self.NK = k.shape[3]
        if bias is not None and mask is not None and (self.R == 1 or mask.stride(1) == 0):
            bias, mask = bias.masked_fill(~mask[:, :1, None], float("-inf")), None
        self.bias = None if bias is None else pad_bias(bias, q.dtype)
        self.mask = None if mask is None else last_contiguous(mask).view(torch.uint8)
        self._descriptors: dict[tuple, TensorDescriptor] = {}
        self.hopper_descriptors: dict[tuple, object] = {}
        self._readable: dict[str, bool] = {}
        self.wide = q.dtype == torch.float32
        self.seed, self.scale, self.dropout_p, self.offsets = seed, scale, dropout_p, offsets

    def config(self, kernel: str) -> dict:
        """The table's configuration of a kernel ("forward", "queries", "keys", "bias") for this call."""
        table = triton_support.load_table("evoflash3d", triton_support.architecture(self.q.device.index))
        return choose_config(table, kernel, self.q.dtype, self.D, max(self.NQ, self.NK), dropout=self.dropout_p > 0.0)

    def rows_config(self) -> dict:
        """The table's configuration of the kernel that makes dq, dk and dv in one; empty where it has none."""
        table = triton_support.load_table("evoflash3d", triton_support.architecture(self.q.device.index))
        bits = "32" if self.wide else "16"
        by_length = table["configs"].get("rows", {}).get(bits, {}).get(f"D{self.D}", {})
        fitting = (by_length.get(str(n)) for n in LENGTH_BUCKETS if max(self.NQ, self.NK) <= n)
        return next(fitting, None) or {}

    def arguments(
        self,
        config: dict,
        gradients: dict[str, Tensor] | None = None,
        transposed_bias: bool = False,
        tiled_statistics: bool = True,
    ) -> dict[str, object]:
        """Everything that the kernels have in common, by argument name.

        Args:
            gradients: grad_out, lse2 and delta for a backward kernel.
            transposed_bias: hand over the bias as [B, H, NK, NQ].
            tiled_statistics: lse2 and delta as descriptors when the other tensors are.
        """
        queries, keys = {"q": self.q}, {"k": self.k, "v": self.v}
        statistics = {}
        if gradients is not None:
            queries["grad_out"] = gradients["grad_out"]
            statistics = {name: gradients[name] for name in ("lse2", "delta")}
        tma = self._uses_tma(config, queries | keys)
        rows, columns = config["block_i"], config["block_j"]
        arguments: dict[str, object] = {
            **self._common,
            **self._bias_argument((columns, rows) if transposed_bias else (rows, columns), tma, transposed_bias),
            "BLOCK_I": rows,
            "BLOCK_J": columns,
            "EVEN_I": self.NQ % rows == 0,
            "EVEN_J": self.NK % columns == 0,
            "TMA": tma,
        }
        for name, tensor in queries.items():
            arguments[name] = self._row_descriptor(name, tensor, rows) if tma else tensor
        for name, tensor in keys.items():
            arguments[name] = self._row_descriptor(name, tensor, columns) if tma else tensor
        for name, tensor in statistics.items():
            flat = tensor.view(-1, tensor.shape[-1])
            arguments[name] = (
                TensorDescriptor(flat, [flat.shape[0], self.NQ], list(flat.stride()), [1, rows])
                if tma and tiled_statistics
                else tensor
            )
            arguments["pitch"] = tensor.shape[-1]
        if gradients is not None:
            arguments |= self.strides("g", gradients["grad_out"])
        return arguments

    @staticmethod
    def strides(name: str, tensor: Tensor) -> dict[str, int]:
        """Strides of a [B, R, H, N, D] tensor as <name>_b, <name>_r, <name>_h, <name>_n."""
        return dict(zip((f"{name}_b", f"{name}_r", f"{name}_h", f"{name}_n"), tensor.stride()[:4]))

    def _uses_tma(self, config: dict, tensors: dict[str, Tensor]) -> bool:
        """Whether this configuration wants the copy engine, and it can read these tensors and the bias."""
        wanted = config.get("tma") and (self.bias is None or self.bias.element_size() == 2)
        return bool(wanted) and self.copy_engine_serves(tensors)

    def copy_engine_serves(self, tensors: dict[str, Tensor]) -> bool:
        """Whether TMA can read these tensors, by name; each is looked at once."""
        for name, tensor in tensors.items():
            if name not in self._readable:
                self._readable[name] = copy_engine_reads(tensor)
        return all(self._readable[name] for name in tensors)

    def _row_descriptor(self, name: str, tensor: Tensor, block: int) -> TensorDescriptor:
        """`row_descriptor`, made once for all kernels of this call."""
        if (name, block) not in self._descriptors:
            self._descriptors[name, block] = row_descriptor(tensor, block)
        return self._descriptors[name, block]

    def _bias_argument(self, tile: tuple[int, int], tma: bool, transposed: bool) -> dict[str, object]:
        if self.bias is None:  # something stands in its place; the kernel never reads it
            none = self._row_descriptor("q", self.q, tile[0]) if tma else self.q
            return {"bias": none, "BIAS_ROWS": 0, "BIAS_COLUMNS": 0}
        bias = self.bias.transpose(-1, -2).contiguous() if transposed else self.bias
        rows, columns = bias.shape[-2:]
        if tma and (transposed, tile) not in self._descriptors:
            flat = bias.view(-1, columns)
            self._descriptors[transposed, tile] = TensorDescriptor(
                flat, list(flat.shape), list(flat.stride()), list(tile)
            )
        argument = self._descriptors[transposed, tile] if tma else bias
        return {"bias": argument, "BIAS_ROWS": rows, "BIAS_COLUMNS": columns}

    @functools.cached_property
    def _common(self) -> dict[str, object]:
        """What does not depend on the configuration: strides, sizes, mask, scale, dropout, global offsets."""
        b0, r0, h0, i0, j0 = self.offsets
        mask_b, mask_r = (0, 0) if self.mask is None else self.mask.stride()[:2]
        return {
            **self.strides("q", self.q),
            **self.strides("k", self.k),
            **self.strides("v", self.v),
            "D": self.D,
            "BLOCK_D": block_d(self.D),
            "HAS_BIAS": self.bias is not None,
            "HAS_MASK": self.mask is not None,
            "DROPOUT": self.dropout_p > 0.0,
            "PRECISION": triton_support.float32_precision(),
            "WIDE": self.wide,
            "mask": self.q if self.mask is None else self.mask,
            "mask_b": mask_b,
            "mask_r": mask_r,
            "R": self.R,
            "H": self.H,
            "NQ": self.NQ,
            "NK": self.NK,
            "scale": self.scale,
            "seed": self.q if self.seed is None else self.seed,
            "threshold": keep_threshold(self.dropout_p),
            "inverse_keep": 1.0 / (1.0 - self.dropout_p),
            "b0": b0,
            "r0": r0,
            "h0": h0,
            "i0": i0,
            "j0": j0,
        }


def hopper_kernels(problem: Problem, config: dict, gradients: dict[str, Tensor] | None = None) -> ModuleType | None:
    """`hopper.launch` where the table wants the Hopper kernels and they serve the call, else None."""
    if "gluon" not in config or not triton_support.has_gluon() or not hopper_serves(problem, gradients):
        return None
    from megafold.evoflash3d.hopper import launch

    return launch


def hopper_serves(problem: Problem, gradients: dict[str, Tensor] | None = None) -> bool:
    """Whether the Hopper kernels can compute the call.

    They take bf16 inputs that the copy engine can read, a bias, head dims 32 and 64, no mask that differs between rows,
    and no dropout: what they have been checked with on a device.
    """
    tensors = {"q": problem.q, "k": problem.k, "v": problem.v}
    if gradients is not None:
        tensors["grad_out"] = gradients["grad_out"]
    return (
        problem.bias is not None
        and problem.q.dtype == torch.bfloat16
        and problem.mask is None
        and problem.dropout_p == 0.0
        and problem.D in (32, 64)
        and problem.copy_engine_serves(tensors)
    )


def copy_engine_reads(tensor: Tensor) -> bool:
    """Whether TMA can read a [B, R, H, N, D] tensor: 16-bit elements, address and strides multiples of 16 bytes."""
    return (
        tensor.element_size() == 2
        and tensor.data_ptr() % 16 == 0
        and all(size == 1 or (s > 0 and s % 8 == 0) for size, s in zip(tensor.shape[:4], tensor.stride()[:4]))
    )


def row_descriptor(tensor: Tensor, block: int) -> TensorDescriptor:
    """TMA descriptor of a [B, R, H, N, D] tensor with tiles of `block` rows."""
    # The stride of an axis of size 1 may be anything in PyTorch; the copy engine wants a multiple of 16 bytes.
    strides = [s if size > 1 else 16 for size, s in zip(tensor.shape[:4], tensor.stride()[:4])]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, 1, 1, block, block_d(tensor.shape[-1])])


def pad_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous [B, H, NQ, NK] padded to multiples of PADDING, with -inf at padded keys; bf16 when `dtype` is."""
    bias = bias.to(torch.bfloat16) if dtype == torch.bfloat16 else bias
    bias = bias if bias.data_ptr() % 16 == 0 else bias.clone()  # the copy engine wants aligned addresses
    rows, columns = (-size % PADDING for size in bias.shape[-2:])
    if not rows and not columns:
        return bias.contiguous()
    return torch.nn.functional.pad(torch.nn.functional.pad(bias, (0, columns), value=float("-inf")), (0, 0, 0, rows))


def options(config: dict) -> dict[str, int]:
    """Compiler options of a launch configuration: num_warps, num_stages and, where given, maxnreg or waves_per_eu."""
    names = ("num_warps", "num_stages", "maxnreg", "waves_per_eu")
    return {name: config[name] for name in names if config.get(name) is not None}


def block_d(head_dim: int) -> int:
    """The head dim that a tile holds: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def last_contiguous(tensor: Tensor) -> Tensor:
    """The tensor itself when its last dimension is contiguous, and a tile's offsets fit in 32 bits; else a copy."""
    strides = tensor.stride()
    fits = tensor.dim() < 4 or strides[-2] < 2**31 // 256
    return tensor if strides[-1] == 1 and fits else tensor.contiguous()


def output_like(tensor: Tensor) -> Tensor:
    """Uninitialised, in the memory order of `tensor`, with a contiguous last dimension as kernels store it."""
    like = torch.empty_like(tensor)
    return like if last_contiguous(like) is like else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def as_like(result: Tensor, tensor: Tensor) -> Tensor:
    """A tensor from `output_like` with exactly the strides of `torch.empty_like(tensor)`."""
    if last_contiguous(tensor) is tensor or result.stride() == torch.empty_like(tensor, device="meta").stride():
        return result
    return torch.empty_like(tensor).copy_(result)


def choose_config(
    table: dict, kernel: str, dtype: torch.dtype, head_dim: int, length: int, dropout: bool = False
) -> dict:
    """Pick from a table's "configs": kernel -> "16" or "32" bits -> "D32", "D64" or "D128" -> length bucket.

    Where the random bits of dropout need more registers than the others leave, there is a configuration "dropout".
    """
    bits = "32" if dtype == torch.float32 else "16"
    by_length = table["configs"][kernel][bits][f"D{max(32, block_d(head_dim))}"]
    if dropout and "dropout" in by_length:
        return by_length["dropout"]
    for limit in LENGTH_BUCKETS:
        if length <= limit:
            return by_length[str(limit)]
    return by_length["longer"]
