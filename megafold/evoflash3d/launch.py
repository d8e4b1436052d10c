"""What all kernels of one call share on the host: prepared inputs, strides, sizes and the launch configuration."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d.reference import keep_threshold

LENGTH_BUCKETS = (128, 256, 512, 1024)
"""A table has an entry for lengths up to each of these, and "longer"."""


class Problem:
    """The inputs of one call as kernels take them.

    q, k, v and the mask are used through their strides (copied only when the last dimension is not contiguous). The
    bias, which every row reads, is made contiguous, and bf16 when q is.
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
        self.bias = bias
        if bias is not None:
            self.bias = bias.to(torch.bfloat16 if q.dtype == torch.bfloat16 else bias.dtype).contiguous()
        self.mask = None if mask is None else last_contiguous(mask).view(torch.uint8)
        self.seed, self.scale, self.dropout_p, self.offsets = seed, scale, dropout_p, offsets

    def config(self, kernel: str) -> dict:
        """The table's configuration of "forward", "rows" or "bias" for this device, dtype, head dim and length."""
        table = triton_support.load_table("evoflash3d", triton_support.architecture(self.q.device.index))
        return choose_config(table, kernel, self.q.dtype, self.D, max(self.NQ, self.NK))

    def inputs(self) -> dict:
        """Pointers and strides of q, k, v, bias, mask and seed."""
        none = self.q  # stands for an absent tensor; the kernel never reads it
        bias_strides = (0, 0, 0) if self.bias is None else self.bias.stride()[:3]
        mask_strides = (0, 0) if self.mask is None else self.mask.stride()[:2]
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "bias": none if self.bias is None else self.bias,
            "mask": none if self.mask is None else self.mask,
            "seed": none if self.seed is None else self.seed,
            **self.strides("q", self.q),
            **self.strides("k", self.k),
            **self.strides("v", self.v),
            **dict(zip(("bias_b", "bias_h", "bias_i"), bias_strides)),
            **dict(zip(("mask_b", "mask_r"), mask_strides)),
        }

    @staticmethod
    def strides(name: str, tensor: Tensor) -> dict:
        """Strides of a [B, R, H, N, D] tensor as <name>_b, <name>_r, <name>_h, <name>_n."""
        return dict(zip((f"{name}_b", f"{name}_r", f"{name}_h", f"{name}_n"), tensor.stride()[:4]))

    def sizes(self) -> dict:
        """Sizes, scale, dropout and global offsets."""
        b0, r0, h0, i0, j0 = self.offsets
        return {
            "R": self.R,
            "H": self.H,
            "NQ": self.NQ,
            "NK": self.NK,
            "scale": self.scale,
            "threshold": keep_threshold(self.dropout_p),
            "inverse_keep": 1.0 / (1.0 - self.dropout_p),
            "b0": b0,
            "r0": r0,
            "h0": h0,
            "i0": i0,
            "j0": j0,
        }

    def constants(self, config: dict) -> dict:
        """Compile-time arguments that every kernel has."""
        return {
            "D": self.D,
            "BLOCK_D": block_d(self.D),
            "BLOCK_I": config["block_i"],
            "BLOCK_J": config["block_j"],
            "HAS_BIAS": self.bias is not None,
            "HAS_MASK": self.mask is not None,
            "DROPOUT": self.dropout_p > 0.0,
            "EVEN_I": self.NQ % config["block_i"] == 0,
            "EVEN_J": self.NK % config["block_j"] == 0,
            "PRECISION": triton_support.float32_precision(),
        }


def options(config: dict) -> dict:
    """Compiler options of a launch configuration: num_warps, num_stages and, where given, maxnreg or waves_per_eu."""
    names = ("num_warps", "num_stages", "maxnreg", "waves_per_eu")
    return {name: config[name] for name in names if config.get(name) is not None}


def block_d(head_dim: int) -> int:
    """The head dim that a tile holds: the next power of two, at least 16."""
    return max(16, triton.next_power_of_2(head_dim))


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
    like = torch.empty_like(tensor, device="meta")
    return result if result.stride() == like.stride() else torch.empty_like(tensor).copy_(result)


def choose_config(table: dict, kernel: str, dtype: torch.dtype, head_dim: int, length: int) -> dict:
    """Pick from a table: kernel -> "16" or "32" bits -> "D32", "D64" or "D128" -> length bucket."""
    bits = "32" if dtype == torch.float32 else "16"
    by_length = table[kernel][bits][f"D{max(32, block_d(head_dim))}"]
    for limit in LENGTH_BUCKETS:
        if length <= limit:
            return by_length[str(limit)]
    return by_length["longer"]
