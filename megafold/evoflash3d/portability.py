"""Every kernel and launch configuration that ships, as cases for compiling without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megafold import triton_support
from megafold.evoflash3d.backward import bias_kernel, keys_kernel, queries_kernel
from megafold.evoflash3d.forward import forward_kernel
from megafold.evoflash3d.launch import options
from megafold.testing import OfflineKernel, compile_offline

KERNELS = {"forward": forward_kernel, "queries": queries_kernel, "keys": keys_kernel, "bias": bias_kernel}
POINTERS = {
    "mask": "*u8:16",
    "seed": "*i64:16",
    **dict.fromkeys(("lse", "lse2", "delta", "dbias"), "*fp32:16"),
}
SCALARS = {"scale": "fp32", "inverse_keep": "fp32", "threshold": "i64"}


@dataclass(frozen=True)
class Case:
    """One kernel to compile: architecture, kernel, dtype ("bf16", "fp16" or "fp32"), head dim, configuration."""

    arch: str
    kernel: str
    dtype: str
    head_dim: int
    config: dict = field(hash=False)
    mask: bool = False
    dropout: bool = False

    def __str__(self) -> str:
        parts = [self.arch, self.kernel, self.dtype, f"D{self.head_dim}", f"{self.config['block_i']}x"]
        extras = "-mask" * self.mask + "-dropout" * self.dropout
        return "-".join(parts) + f"{self.config['block_j']}{extras}"

    def compile(self) -> OfflineKernel:
        """Compile with a bias, at lengths that are multiples of the tiles, as the shapes of training are."""
        kernel = KERNELS[self.kernel]
        config = self.config
        tma = bool(config.get("tma")) and self.dtype != "fp32"
        constants = {
            "D": self.head_dim,
            "BLOCK_D": self.head_dim,
            "BLOCK_I": config["block_i"],
            "BLOCK_J": config["block_j"],
            "HAS_BIAS": True,
            "HAS_MASK": self.mask,
            "DROPOUT": self.dropout,
            "EVEN_I": True,
            "EVEN_J": True,
            "PRECISION": "tf32" if self.arch.startswith("sm") else "ieee",
            "TMA": tma,
            "WIDE": self.dtype == "fp32",
            "NATURAL": False,
            "FEW": False,
        }
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        rows, columns = config["block_i"], config["block_j"]
        signature = dict(POINTERS | SCALARS)
        tiles = {
            **{name: [1, 1, 1, rows, self.head_dim] for name in ("q", "grad_out")},
            **{name: [1, 1, 1, columns, self.head_dim] for name in ("k", "v")},
            "bias": [columns, rows] if self.kernel == "keys" else [rows, columns],
        }
        for name, tile in tiles.items():
            signature[name] = f"tensordesc<{self.dtype}{tile}>" if tma else f"*{self.dtype}:16"
        if tma and self.kernel == "keys":
            signature |= dict.fromkeys(("lse2", "delta"), f"tensordesc<fp32{[1, rows]}>")
        for name in kernel.arg_names:
            output = name in ("out", "dq", "dk", "dv")
            stride_or_length = "_" in name or name in ("NQ", "NK", "pitch", "BIAS_ROWS", "BIAS_COLUMNS")
            default = f"*{self.dtype}:16" if output else "i32:16" if stride_or_length else "i32"
            signature.setdefault(name, default)
        return compile_offline(kernel, signature, constants, self.arch, options(config))


def cases(full: bool = False) -> Iterator[Case]:
    """Distinct cases of the shipped tables; unless `full`, one configuration of each kernel for bf16 at D 32 and 64,
    and on the oldest architecture of each vendor also fp32 at D 32 and bf16 at D 128; no mask and no dropout."""
    seen = set()
    for arch in triton_support.ARCHITECTURES:
        for kernel, by_bits in triton_support.shipped_table("evoflash3d", arch)["configs"].items():
            for bits, by_dim in by_bits.items():
                for dim, by_length in by_dim.items():
                    for length, config in by_length.items():
                        if "block_i" not in config:  # Hopper kernels alone
                            continue
                        quick = (bits, dim) in (("16", "D32"), ("16", "D64"))
                        if arch in ("sm_80", "gfx90a"):
                            quick |= (bits, dim) in (("16", "D128"), ("32", "D32"))
                        if not full and not (quick and length == "1024"):
                            continue
                        dtypes = ("fp32",) if bits == "32" else ("bf16", "fp16") if full else ("bf16",)
                        for dtype in dtypes:
                            for extras in _variants(length, by_length) if full else ((False, False),):
                                case = Case(arch, kernel, dtype, int(dim[1:]), config, *extras)
                                key = (str(case), tuple(sorted((k, v) for k, v in config.items() if k != "gluon")))
                                if key not in seen:
                                    seen.add(key)
                                    yield case


def _variants(length: str, by_length: dict) -> list[tuple[bool, bool]]:
    """(mask, dropout) that run with the configuration of a length bucket."""
    if length == "dropout":
        return [(True, True)]
    return [(False, False), (True, False), *([] if "dropout" in by_length else [(True, True)])]


def problems(case: Case, compiled: OfflineKernel, shared_cap: int) -> list[str]:
    """What keeps a compiled kernel from shipping; empty when nothing does."""
    found = []
    if compiled.spill_bytes:
        found.append(f"spills {compiled.spill_bytes} bytes")
    if compiled.shared_bytes > shared_cap:
        found.append(f"needs {compiled.shared_bytes} bytes of shared memory, the cap is {shared_cap}")
    if not compiled.matrix_instructions:
        found.append("has no matrix instruction")
    if compiled.swap_loops:
        found.append("has a compare-and-swap loop")
    return found
