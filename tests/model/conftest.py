"""Small labelled batches and models without symmetric or silent parts, for the tests of megafold.model."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

Batch = dict[str, Tensor | None]
Step = tuple[Tensor, dict[str, Tensor]]

# Beside twice the stock error, an error of this many roundings is allowed, relative to the largest gradient of the same
# module (a bias that shifts all logits has the gradient 0, and what it gets instead is rounding). Measured: up to 34.
ROUNDINGS = 64 * 2.0**-24


def _batch(
    *lengths: int,
    msa: bool = True,
    templates: bool = True,
    confidence: bool = False,
    distances: bool = False,
    seed: int = 0,
) -> Batch:
    """One structure of each length (tokens), of 1 to 5 atoms a token, padded to the longest; two chains a structure."""
    g = torch.Generator().manual_seed(seed)
    size, tokens = len(lengths), max(lengths)
    is_token = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    lens = torch.randint(1, 6, (size, tokens), generator=g) * is_token
    atoms = int(lens.sum(-1).max())
    starts = lens.cumsum(-1) - lens
    representative = torch.where(is_token, starts, -1)
    second = torch.arange(tokens) >= tokens // 2
    feats = torch.stack((torch.arange(tokens), torch.arange(tokens), second, second, torch.zeros(tokens)), -1).long()
    types = torch.zeros(size, tokens, 5, dtype=torch.bool)
    types[:, :, 0] = True
    parents = torch.zeros(size, atoms, dtype=torch.long)
    for row in range(size):
        count = int(lens[row].sum())
        parents[row, :count] = second.long().repeat_interleave(lens[row]) + 1
    batch: Batch = {
        "atom_inputs": torch.randn(size, atoms, 3, generator=g),
        "atompair_inputs": torch.randn(size, -(-atoms // 27), 27, 54, 5, generator=g),
        "molecule_atom_lens": lens,
        "molecule_ids": torch.randint(0, 20, (size, tokens), generator=g),
        "additional_molecule_feats": feats.expand(size, -1, -1).contiguous(),
        "additional_token_feats": torch.randn(size, tokens, 33, generator=g),
        "is_molecule_types": types,
        "is_molecule_mod": torch.rand(size, tokens, 4, generator=g) < 0.2,
        "atom_parent_ids": parents,
        "missing_atom_mask": torch.rand(size, atoms, generator=g) < 0.1,
        "token_bonds": torch.rand(size, tokens, tokens, generator=g) < 0.1,
        "atom_pos": torch.randn(size, atoms, 3, generator=g) * 8,
        "molecule_atom_indices": representative,
        "distogram_atom_indices": representative,
    }
    if msa:
        batch["msa"] = torch.randn(size, 5, tokens, 32, generator=g)
        batch["msa_mask"] = torch.arange(5).expand(size, -1) < 4
        batch["additional_msa_feats"] = torch.randn(size, 5, tokens, 2, generator=g)
    if templates:
        batch["templates"] = torch.randn(size, 2, tokens, tokens, 108, generator=g)
        batch["template_mask"] = torch.tensor([[True, False]]).expand(size, -1).contiguous()
    if confidence:
        frames = torch.stack((starts, starts + 1, starts + 2), -1)
        batch["atom_indices_for_frame"] = torch.where((lens >= 3)[..., None], frames, -1)
        batch["resolved_labels"] = torch.randint(0, 2, (size, atoms), generator=g)
        batch["resolution"] = torch.full((size,), 2.0)
    if distances:
        batch["distance_labels"] = torch.randint(0, 64, (size, tokens, tokens), generator=g)
        del batch["token_bonds"], batch["distogram_atom_indices"]
    return batch


@pytest.fixture()
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and losses in as many chunks as there can be, blocks in groups: what long structures get."""
    from megafold.model import confidence, lddt, pair_loss, recompute

    monkeypatch.setattr(recompute, "GROUPED_FROM", 1)
    monkeypatch.setattr(recompute, "GROUP", 2)
    for module, name in ((confidence, "CHUNK_PAIRS"), (lddt, "CHUNK_PAIRS"), (pair_loss, "CHUNK_LOGITS")):
        monkeypatch.setattr(module, name, 1)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., Batch]:
    return _batch


@contextmanager
def _float64() -> Iterator[None]:
    """Everything in float64, the stock code's casts to float32 included, with the random numbers of a float32 run."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rand", "randn", "randn_like"):
            draw = getattr(torch, name)
            patch.setattr(torch, name, lambda *a, d=draw, **k: d(*a, **{**k, "dtype": torch.float32}).double())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def _make_model(**overrides: object) -> torch.nn.Module:
    from megafold.model.build import build_model

    torch.manual_seed(0)
    model = build_model("tiny", **overrides)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A module that starts as zero hides whatever is before it; norms and gates that start equal hide swaps.
            starts_flat = parameter.numel() > 1 and parameter.unique().numel() == 1
            if starts_flat or "to_adaln_zero_gamma" in name:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.3)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    """The tiny preset, every parameter random, dropout off."""
    return _make_model


def _step(model: torch.nn.Module, batch: Batch, **kwargs: object) -> Step:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    random.seed(3)  # stochastic frame averaging draws from it
    loss = model(**batch, **kwargs)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="session")
def step() -> Callable[..., Step]:
    """step(model, batch, **forward arguments) -> the loss and every gradient by name, from a fixed seed."""
    return _step


def _step_in_float64(model: torch.nn.Module, batch: Batch, **kwargs: object) -> Step:
    double = {k: v.double() if v is not None and v.is_floating_point() else v for k, v in batch.items()}
    with _float64():
        return _step(copy.deepcopy(model).double(), double, **kwargs)


@pytest.fixture(scope="session")
def step_in_float64() -> Callable[..., Step]:
    return _step_in_float64


def _beyond_budget(found: Step, stock: Step | Sequence[Step], exact: Step, roundings: float = ROUNDINGS) -> list[str]:
    """What differs from ``exact`` by more than twice what ``stock`` does, and a rounding; every name is compared.

    Of several steps of the stock model that should give the same, the root of their mean squared error counts.
    """
    samples = [stock] if isinstance(stock, tuple) else stock
    assert all(found[1].keys() == sample[1].keys() == exact[1].keys() for sample in samples)

    def of_stock(name: str, true: Tensor) -> float:
        values = [sample[0] if name == "loss" else sample[1][name] for sample in samples]
        return math.sqrt(sum((value - true).norm().item() ** 2 for value in values) / len(values))

    scales: dict[str, float] = {}
    for name, gradient in exact[1].items():
        module = name.rpartition(".")[0]
        scales[module] = max(scales.get(module, 0.0), gradient.norm().item())
    compared = [("loss", found[0], exact[0], exact[0].abs().item())]
    compared += [(n, g, exact[1][n], scales[n.rpartition(".")[0]]) for n, g in found[1].items()]
    beyond = []
    for name, ours, true, scale in compared:
        error, allowed = (ours - true).norm().item(), 2 * of_stock(name, true) + roundings * scale
        if not error <= allowed:
            beyond.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}, size {scale:.2e}")
    return beyond


@pytest.fixture(scope="session")
def beyond_budget() -> Callable[..., list[str]]:
    return _beyond_budget
