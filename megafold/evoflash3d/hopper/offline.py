"""The Hopper kernels as cases of the portability gate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from triton.experimental.gluon import language as gl

from megafold import triton_support
from megafold.evoflash3d.hopper.bias import bias_kernel_sm90
from megafold.evoflash3d.hopper.forward import forward_kernel_sm90
from megafold.evoflash3d.hopper.keys import keys_kernel_sm90
from megafold.evoflash3d.hopper.launch import room_for
from megafold.evoflash3d.hopper.queries import queries_kernel_sm90
from megafold.evoflash3d.hopper.rows import rows_kernel_sm90
from megafold.testing import OfflineKernel, compile_offline

KERNELS = {
    "forward": forward_kernel_sm90,
    "queries": queries_kernel_sm90,
    "keys": keys_kernel_sm90,
    "bias": bias_kernel_sm90,
    "rows": rows_kernel_sm90,
}
CHOICES = {
    "forward": ({"shares": False}, {"shares": True}),
    "queries": ({"own_delta": False, "overlap": True}, {"own_delta": True, "overlap": False}),
    "keys": ({"overlap": True},),
    "bias": ({"overlap": True},),
    "rows": ({"overlap": True},),
}
"""What a table may choose beside sizes, compiled whether or not it does."""

TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32}


@dataclass(frozen=True)
class HopperCase:
    """One Hopper kernel to compile: kernel, dtype ("bf16" or "fp16"), head dim, the "gluon" part of a configuration."""

    kernel: str
    dtype: str
    head_dim: int
    config: dict = field(hash=False)
    arch: str = "sm_90"

    def __str__(self) -> str:
        own = "".join(f"-{name}" for name in ("own_delta", "shares") if self.config.get(name))
        return f"sm_90-hopper-{self.kernel}-{self.dtype}-D{self.head_dim}-{self.config['block']}{own}"

    def compile(self) -> OfflineKernel:
        """Compile for lengths and strides that are multiples of 16, as the copy engine needs them.

        What counts as spilled is what moves in the loops over tiles: a group of warps starts with fewer registers than
        it works with, and some numbers that it needs once wait in memory meanwhile.
        """
        kernel, block = KERNELS[self.kernel], self.config["block"]
        held = 16 * self.config["warps"] * self.config["parts"]
        rows, columns = (block, held) if self.kernel == "keys" else (held, block)
        constants = {
            "D": self.head_dim, "ROWS": self.config.get("rows"), "BLOCK_I": rows, "BLOCK_J": columns,
            "STAGES": self.config["stages"], "STEP": self.config.get("step"),
            "WARPS": self.config["warps"],
            "PARTS": self.config["parts"], "REGISTERS": self.config["registers"],
            "QUERIES": self.config.get("queries"), "KEY_STAGES": self.config.get("key_stages"),
            "SCORE_STAGES": self.config.get("score_stages"), "QUERY_REGISTERS": self.config.get("query_registers"),
            "OWN_DELTA": self.config.get("own_delta", False), "NATURAL": False,
            "SHARES": self.config.get("shares", False), "OVERLAP": self.config.get("overlap", False),
        }  # fmt: skip
        signature = {"scale": "fp32", "items": "i32", "head_dim": "i32:16", "rows_per_chunk": "i32"}
        for name, length in (("q", rows), ("grad_out", rows), ("out", rows), ("k", columns), ("v", columns)):
            signature[name] = _descriptor([1, 1, 1, length, self.head_dim], self.dtype)
        signature["bias"] = _descriptor([rows, columns], self.dtype)
        statistics = {"forward": "*fp32:16", "queries": "*fp32:16"}.get(self.kernel, _descriptor([1, rows], "fp32"))
        signature |= dict.fromkeys(("lse2", "delta"), statistics) | dict.fromkeys(("lse", "dbias"), "*fp32:16")
        if self.kernel == "forward":
            signature["out"] = f"*{self.dtype}:16"
        if self.kernel == "bias":
            signature["bias"] = f"*{self.dtype}:16"
        for name in kernel.arg_names:
            output = name in ("out", "dq", "dk", "dv")
            signature.setdefault(name, f"*{self.dtype}:16" if output else "i32:16" if len(name) > 1 else "i32")
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        compiled = compile_offline(kernel, signature, constants, self.arch, {"num_warps": self.config["warps"]})
        return replace(compiled, spill_bytes=4 * compiled.loop_spills)


def cases(full: bool = False) -> Iterator[HopperCase]:
    """Distinct cases of the shipped table; unless `full`, one configuration of each kernel and head dim.

    In bf16, which is what the Hopper kernels serve.
    """
    seen = set()
    for kernel, by_bits in triton_support.shipped_table("evoflash3d", "sm_90")["configs"].items():
        for dim, by_length in by_bits["16"].items():
            for length, config in by_length.items():
                if "gluon" not in config or not (full or length == "1024"):
                    continue
                for choice in CHOICES[kernel]:
                    given = config["gluon"] | choice
                    if kernel == "rows":
                        given["queries"] = room_for(int(length))
                    case = HopperCase(kernel, "bf16", int(dim[1:]), given)
                    key = (str(case), tuple(sorted(case.config.items())))
                    if key not in seen:
                        seen.add(key)
                        yield case


def _descriptor(block: list[int], dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return f"tensordesc<{dtype}{block},{layout!r}>"
