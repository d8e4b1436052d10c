"""Loss curves beside the stock model's: `python -m megafold.train.curves --cache CACHE --out FOLDER`.

Four runs of a small model on one crop of each structure of a cache, in turn: MegaFold from seed 0 and the stock model
from seeds 0, 1 and 2. Dropout and noise are drawn in the same order by both, so MegaFold's curve is that of the stock
model from the same seed up to rounding; later the two part, as two runs of the stock model would whose sums have
another order. Two things are judged:

    close:  over the first steps the mean relative difference from the stock model of the same seed is below CLOSE;
    band:   in windows of 20 steps MegaFold's mean loss lies within what three runs say of a fourth, the 95 % prediction
            interval of Student's t with two degrees of freedom; one window in ten may lie outside.

The first is the sharp one: in float32 an error of 1 % in the gradients fails it (tests). Under bfloat16 the gradients
are rounded by about as much. Printed besides is the range of the three runs, which is no band for a fourth: of four
equal runs each has the largest or smallest mean in half of all windows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megafold.errors import EXIT_BAD_INPUT, InputError
from megafold.model.build import build_model
from megafold.model.optimize import optimize
from megafold.model.plan import Plan
from megafold.train.optimizer import OptimizerSettings
from megafold.train.trainer import Trainer

OURS, STOCK = "megafold", ("stock-0", "stock-1", "stock-2")
RUNS: dict[str, tuple[Plan | None, int]] = {OURS: (Plan(), 0), "stock-0": (None, 0), "stock-1": (None, 1)}
RUNS |= {"stock-2": (None, 2)}
# The tiny preset with more than one block in each stack, checkpointed, so that graphs have what they are for.
DEEP: dict[str, Any] = {
    **{f"checkpoint_{part}": True for part in ("input_embedding", "trunk_pairformer", "diffusion_module")},
    "pairformer_stack": {"depth": 3},
    "msa_module_kwargs": {"depth": 2},
    "diffusion_module_kwargs": {"token_transformer_depth": 2},
}
SETTINGS = OptimizerSettings(learning_rate=3e-3, warmup_steps=5)
CROP, ALIGNMENT_ROWS = 64, 16
FIRST, WINDOW = 30, 20
# In float32 thousands of terms are added in another order: some roundings of 2^-23 (measured: 3). In bfloat16 each
# product is rounded by up to 2^-8, and a loss averages over thousands of them: an eighth of 2^-7 (measured: half that).
CLOSE = {"float32": 16 * torch.finfo(torch.float32).eps, "bfloat16": torch.finfo(torch.bfloat16).eps / 8}
T_95 = 4.3027  # Student's t, two degrees of freedom, two-sided 95 %


def losses(
    batches: Sequence[Mapping[str, Any]],
    steps: int,
    *,
    plan: Plan | None,
    seed: int,
    device: str = "cpu",
    change: Callable[[torch.nn.Module], None] = lambda model: None,
) -> Iterator[float]:
    """The loss of each step of a fresh model on ``batches`` in turn; ``plan`` None is the stock model.

    Args:
        batches: keyword arguments of ``Alphafold3.forward``, batch size 1.
        seed: of the weights, and again of dropout and noise.
        change: done to the model before the first step.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    model = build_model("tiny", **DEEP).to(device)
    if plan is not None:
        optimize(model, plan)
    change(model)
    trainer = Trainer(model, SETTINGS, device=device)
    torch.manual_seed(seed)
    for step in range(steps):
        yield trainer.step({**batches[step % len(batches)], "num_recycling_steps": 1}).loss


def relative_differences(ours: Sequence[float], stock: Sequence[float]) -> list[float]:
    """Of each step, in parts of the stock model's loss."""
    return [abs(a / b - 1) for a, b in zip(ours, stock)]


def judge(curves: Mapping[str, Sequence[float]], dtype: str) -> tuple[bool, list[str]]:
    """Whether MegaFold's curve passes, and what to print of it.

    Args:
        curves: losses by name, of ``RUNS``, equally many.
        dtype: of autocast, a key of ``CLOSE``.

    Raises:
        ValueError: for curves of different or too few steps.
    """
    lengths = {len(curves[name]) for name in RUNS}
    if len(lengths) > 1 or min(lengths) < FIRST:
        raise ValueError(f"curves of {sorted(lengths)} steps: expected equally many, at least {FIRST}")
    apart = relative_differences(curves[OURS][:FIRST], curves["stock-0"])
    is_close = statistics.fmean(apart) <= CLOSE[dtype]
    lines = [
        f"steps 0-{FIRST - 1}: from the stock model of the same seed {statistics.fmean(apart):.1e} of the loss in the "
        f"mean, {max(apart):.1e} at most; allowed in the mean {CLOSE[dtype]:.1e}{'' if is_close else ' FAILS'}"
    ]
    outside, starts = 0, range(0, min(lengths) - WINDOW + 1, WINDOW)
    for start in starts:
        ours, *three = (statistics.fmean(curves[name][start : start + WINDOW]) for name in (OURS, *STOCK))
        centre, half = statistics.fmean(three), T_95 * statistics.stdev(three) * (1 + 1 / len(three)) ** 0.5
        is_inside = abs(ours - centre) <= half
        outside += not is_inside
        beyond = max(min(three) - ours, ours - max(three))
        lines.append(
            f"steps {start}-{start + WINDOW - 1}: MegaFold {ours:.4f}, band {centre - half:.4f} to {centre + half:.4f}"
            f"{'' if is_inside else ' OUTSIDE'}; the three {min(three):.4f} to {max(three):.4f}"
            + (f", {beyond:.4f} outside their range" if beyond > 0 else "")
        )
    allowed = len(starts) // 10
    lines.append(f"{outside} of {len(starts)} windows outside the band, allowed {allowed}")
    return is_close and outside <= allowed, lines


def read_curves(folder: Path) -> tuple[dict[str, list[float]], str]:
    """The curves in a folder, by name, and the dtype that all have.

    Raises:
        InputError: for a curve that is missing or unreadable, or where their dtypes differ.
    """
    curves, dtypes = {}, set()
    for name in RUNS:
        path = folder / f"{name}.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            curves[name] = [float(loss) for loss in content["losses"]]
            dtypes.add(content["dtype"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(path, "losses", f"is no curve of this command: {error}") from None
    if len(dtypes) > 1 or not dtypes <= set(CLOSE):
        raise InputError(folder, "dtype", f"is {', '.join(sorted(dtypes))}, expected one of {', '.join(CLOSE)} for all")
    return curves, dtypes.pop()


def _run(name: str, batches: Sequence[Mapping[str, Any]], steps: int, device: str, folder: Path) -> None:
    plan, seed = RUNS[name]
    on_gpu = device == "cuda"
    facts = {
        "run": name,
        "seed": seed,
        "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "dtype": "bfloat16" if on_gpu else "float32",
        "torch": torch.__version__,
        "commit": os.environ.get("MEGAFOLD_COMMIT"),
    }
    found: list[float] = []
    for loss in losses(batches, steps, plan=plan, seed=seed, device=device):
        found.append(loss)
        if len(found) % WINDOW == 0 or len(found) == steps:
            text = json.dumps({**facts, "losses": found})
            (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{name}: step {len(found)} of {steps}, loss {statistics.fmean(found[-WINDOW:]):.4f}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, judge once all four curves are there: 0 passes, 1 fails, 2 bad input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="EvoPipe cache; without it the curves in --out are judged")
    parser.add_argument("--out", type=Path, required=True, help="folder of the curves, one JSON each")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="several processes may share them")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    if given.cache is not None and given.steps < FIRST:
        parser.error(f"--steps {given.steps}: at least {FIRST} are judged")
    try:
        if given.cache is not None:
            from megafold.evopipe.loader import make_loader

            loader = make_loader(given.cache, crop_size=CROP, msa_depth=ALIGNMENT_ROWS, labels=False)
            batches = list(loader)
            given.out.mkdir(parents=True, exist_ok=True)
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
            for name in given.runs:
                _run(name, batches, given.steps, given.device, given.out)
            if len(given.runs) < len(RUNS):  # the others may be on their way
                return 0
        curves, dtype = read_curves(given.out)
        try:
            passes, lines = judge(curves, dtype)
        except ValueError as error:
            raise InputError(given.out, "losses", str(error)) from None
    except InputError as error:
        print(error, flush=True)
        return EXIT_BAD_INPUT
    print("\n".join([*lines, "passes" if passes else "FAILS"]), flush=True)
    return 0 if passes else 1


if __name__ == "__main__":
    raise SystemExit(main())
