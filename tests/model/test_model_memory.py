"""Shared conditioning keeps the pair representation of the diffusion module to one copy a structure."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megafold.model.plan import Plan

TOKENS, AUGMENTATIONS, WIDTH = 32, 16, 64


class _LargestAllocation(TorchDispatchMode):
    """The most elements of any floating-point storage that an operator returned, and which operator that was."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operator = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                # The storage and not the shape: an expanded tensor is as small as what it expands.
                elements = leaf.untyped_storage().nbytes() // leaf.element_size()
                if elements > self.elements:
                    self.elements, self.operator = elements, str(func)
        return out


def _largest(model, batch) -> _LargestAllocation:
    torch.manual_seed(0)
    with _LargestAllocation() as seen:
        model(**batch).backward()
    return seen


@pytest.mark.parametrize("lengths", [(TOKENS,), (TOKENS, TOKENS)], ids=["one-structure", "two-structures"])
@pytest.mark.parametrize(
    "plan",
    [Plan.only("shared_conditioning"), Plan(), Plan(sdpa=False)],
    ids=["shared_conditioning", "all", "all-through-evoflash3d"],
)
def test_no_tensor_as_large_as_half_the_copies_of_the_pairs(lengths, plan, make_model, make_batch):
    from megafold.model.optimize import optimize

    model = make_model(diffusion_num_augmentations=AUGMENTATIONS, dim_pairwise=WIDTH)
    batch = make_batch(*lengths)
    copies = len(lengths) * AUGMENTATIONS * TOKENS * TOKENS * WIDTH
    assert _largest(model, batch).elements >= copies, "the stock model makes the copies, or this test sees nothing"
    optimize(model, plan)
    seen = _largest(model, batch)
    assert seen.elements < copies / 2, seen.operator


def test_a_repeated_tensor_of_one_structure_is_a_view():
    from megafold.model.repeated import Repeated

    once = torch.randn(1, 3, 4)
    assert Repeated(once, 5).materialize().data_ptr() == once.data_ptr()
    two = torch.randn(2, 3, 4)
    assert torch.equal(Repeated(two, 3).materialize(), two.repeat_interleave(3, dim=0))
    assert Repeated(two, 3).shape == (6, 3, 4)
