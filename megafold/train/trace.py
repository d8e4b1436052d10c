"""What of a training step's communication runs under compute: `torchrun --nproc-per-node P -m megafold.train.trace`.

All P ranks share one structure. Two steps warm up, one is timed and one is traced. Every rank prints a line of JSON:
seconds of communication (kernels of NCCL or RCCL, waiting for the other ranks included), of computation, of both at
once and of neither, and the bytes sent by operator. ``--out FOLDER`` keeps the traces, for a viewer of Chrome traces.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megafold.metrics.overlap import Overlap, Span, overlap
from megafold.model.build import build_model
from megafold.model.optimize import optimize
from megafold.model.plan import Plan
from megafold.model.presets import preset
from megafold.train.parallel import Parallel
from megafold.train.ranks import device_of, find_place, joined
from megafold.train.synthetic import synthetic_batch
from megafold.train.trainer import Trainer

SENDS = ("nccl", "rccl", "gloo:")
COPIES = ("memcpy", "memset")
WARMUP = 2


def split_by_kind(events: list[tuple[str, Span]]) -> tuple[list[Span], list[Span]]:
    """Names and spans of a device's kernels -> spans of communication and of computation; copies are neither."""
    sends = [span for name, span in events if name.lower().startswith(SENDS)]
    others = [span for name, span in events if not name.lower().startswith((*SENDS, *COPIES))]
    return sends, others


def trace_step(trainer: Trainer, batch: dict[str, Any], out: Path | None) -> tuple[float, Overlap]:
    """Seconds of one step and what of it overlaps; the trace is written to ``out``."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = trainer.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        seconds = trainer.step(batch).seconds
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(out))
    events = trace.profiler.kineto_results.events()
    if on_gpu:
        events = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    spans = spans_of([(event.start_ns(), event.duration_ns()) for event in events])
    return seconds, overlap(*split_by_kind([(event.name(), span) for event, span in zip(events, spans)]))


def spans_of(events: Sequence[tuple[int, int]]) -> list[Span]:
    """Start and duration in whole nanoseconds since any moment -> start and end in seconds since the first start.

    Seconds since 1970 would be rounded to a quarter of a microsecond, which is as long as the gap between kernels.
    """
    first = min((start for start, _ in events), default=0)
    return [((start - first) / 1e9, (start - first + duration) / 1e9) for start, duration in events]


def main() -> int:
    """Entry point on every rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="paper")
    parser.add_argument("--n-tokens", type=int, default=768)
    parser.add_argument("--msa-depth", type=int, default=512)
    parser.add_argument("--out", type=Path, help="a folder for the traces")
    given = parser.parse_args()
    if given.n_tokens < 1 or given.msa_depth < 1:
        parser.error(f"--n-tokens and --msa-depth: are {given.n_tokens} and {given.msa_depth}; expected 1 or more")
    place = find_place()
    if place is None:
        parser.error("start several ranks with torchrun or srun")
    device = device_of(place, "auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with joined(place, device, timeout_s=600):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.manual_seed(0)
        with device:
            model = build_model(given.model)
        optimize(model, Plan())
        parallel = Parallel(place.size, device)
        parallel.prepare(model, Plan())
        trainer = Trainer(model, device=device, dtype=dtype, parallel=parallel)
        batch = synthetic_batch(given.n_tokens, msa_depth=given.msa_depth, model_kwargs=preset(given.model))
        for _ in range(WARMUP):
            trainer.step(batch)
        untraced = trainer.step(batch).seconds
        traffic = parallel.shards.traffic
        traffic.clear()
        out = None if given.out is None else given.out / f"rank{place.rank}-n{given.n_tokens}.json.gz"
        seconds, found = trace_step(trainer, batch, out)
        line = {"rank": place.rank, "ranks": place.size, "n_tokens": given.n_tokens, "step_s": untraced}
        line |= {"traced_step_s": seconds, **{f"{name}_s": value for name, value in asdict(found).items()}}
        print(json.dumps(line | {"sent_bytes": traffic.by_operator()}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
