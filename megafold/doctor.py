"""What is installed here, which devices there are, and what would run where."""

from __future__ import annotations

import importlib.metadata
import os
import platform

PACKAGES = ("torch", "triton", "alphafold3-pytorch", "rdkit", "h5py", "submitit", "snakemake")
PEERS = ("trifast", "cuequivariance-torch", "openfold3", "protenix", "liger-kernel")


def diagnose(memory: int | None = None) -> str:
    """One line a fact, for `megafold doctor`; with ``memory`` also what a training step at that many tokens needs."""
    lines = [f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"]
    lines += [f"{name} {_version(name) or 'is missing'}" for name in PACKAGES]
    lines += [f"peer {name}: {_version(name) or 'not installed (make baselines)'}" for name in PEERS]
    lines += _devices()
    if memory is not None:
        from megafold.model.footprint import memory_lines

        lines += memory_lines(memory)
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[str]:
    import torch

    from megafold.metrics.peaks import peak_flops
    from megafold.triton_support import why_not

    if not torch.cuda.is_available():
        return ["device cpu: everything runs, kernels as PyTorch references; memory is the process's peak RSS"]
    lines = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        peak = peak_flops(facts.name, "bf16")
        told = f"{peak[0] / 1e12:.0f} TFLOP/s bf16 ({peak[1]})" if peak else "peak unknown: no MFU is reported"
        lines.append(f"device {index} {facts.name}, {facts.total_memory / 2**30:.0f} GiB: {told}")
        reason = why_not(torch.device("cuda", index))
        lines.append(f"device {index} EvoFlash-3D, EvoFusion: {'Triton kernels' if reason is None else f'{reason}'}")
    return lines
