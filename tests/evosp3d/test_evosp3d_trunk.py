"""Templates, MSA module, pairformer and distogram on P ranks against one device: outputs and every gradient by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from megafold.evosp3d import triangle
from megafold.evosp3d.collectives import Gather, run

RANKS = (1, 2, 3, 4, 5, 8)
# N -> (probability of dropout, checkpointing); the last third of the tokens is masked, so that at 3 ranks and more
# there is a rank whose keys all are.
LENGTHS = {17: (0.25, False), 50: (0.0, False), 64: (0.25, True)}


def _inputs(tokens: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    return {
        "single": draw(1, tokens, 24),
        "pairs": draw(1, tokens, tokens, 16),
        "msa": draw(1, 5, tokens, 32),
        "additional": draw(1, 5, tokens, 2),
        "templates": draw(1, 2, tokens, tokens, 108),
        "single_cotangent": draw(1, tokens, 24),
        "pairs_cotangent": draw(1, tokens, tokens, 16),
        "logits_cotangent": draw(1, 64, tokens, tokens),
    }


def _mask(tokens: int) -> torch.Tensor:
    return (torch.arange(tokens) < tokens - tokens // 3)[None]


def _trunk(model, inputs, tokens, shards=None):
    """Outputs by name (rows where a rank has rows) and the gradients of this rank's part of one scalar."""

    def rows(tensor, dim=1):
        return tensor if shards is None else shards.narrow(tensor, dim)

    torch.manual_seed(5)
    model.zero_grad(set_to_none=True)
    single, pairs = (inputs[name].clone().requires_grad_() for name in ("single", "pairs"))
    mask, msa_mask = _mask(tokens), torch.arange(5)[None] < 4
    x = rows(pairs) * 1.0
    x = x + model.template_embedder(
        templates=inputs["templates"], template_mask=torch.tensor([[True, False]]), pairwise_repr=x, mask=mask
    )
    x = x + model.msa_module(
        msa=inputs["msa"],
        single_repr=single,
        pairwise_repr=x,
        mask=mask,
        msa_mask=msa_mask,
        additional_msa_feats=inputs["additional"],
    )
    single_out, x = model.pairformer(single_repr=single, pairwise_repr=x, mask=mask)
    logits = model.distogram_head(x)
    size = 1 if shards is None else shards.size
    total = (
        (x * rows(inputs["pairs_cotangent"])).sum()
        + (single_out * inputs["single_cotangent"]).sum() / size
        + (logits * rows(inputs["logits_cotangent"], 2)).sum()
    )
    total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients |= {"input.single": single.grad, "input.pairs": pairs.grad}
    outputs = {"single": single_out.detach(), "pairs": x.detach(), "logits": logits.detach()}
    return outputs, gradients


def _prepared(model, tokens, set_dropout):
    model = copy.deepcopy(model)
    probability, checkpointing = LENGTHS[tokens]
    set_dropout(model, probability)
    for module in model.modules():
        if hasattr(module, "checkpoint"):
            module.checkpoint = checkpointing
    return model


def _on_rank(model, set_dropout, lengths, fault):
    from megafold.evosp3d.mesh import make_mesh
    from megafold.evosp3d.parallelize import parallelize

    if fault is not None:
        fault()
    mesh = make_mesh(1, dist.get_world_size(), "cpu")
    found = {}
    for tokens in lengths:
        parallel = _prepared(model, tokens, set_dropout)
        shards = parallelize(parallel, mesh)
        outputs, gradients = _trunk(parallel, _inputs(tokens), tokens, shards)
        outputs["pairs"] = run(Gather(1, tokens), outputs["pairs"], shards, "")
        outputs["logits"] = run(Gather(2, tokens), outputs["logits"], shards, "")
        # The same random numbers were drawn, whatever a rank used of them.
        outputs["generator"] = torch.get_rng_state()[:64].double()
        found[tokens] = outputs, gradients
    return found


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def on_one_device(model, set_dropout):
    found = {}
    for tokens in LENGTHS:
        outputs, gradients = _trunk(_prepared(model, tokens, set_dropout), _inputs(tokens), tokens)
        outputs["generator"] = torch.get_rng_state()[:64].double()
        found[tokens] = outputs, gradients
    return found


def test_no_gradient_of_the_reference_is_zero(on_one_device):
    # The last alignment rows feed nothing, and a bias added to all logits has no effect.
    silent = ("msa_module.layers.0.1.", "msa_module.layers.0.2.", "to_attn_bias_norm.bias")
    for _, gradients in on_one_device.values():
        assert len(gradients) > 80
        zero = [name for name, gradient in gradients.items() if gradient.abs().max() < 1e-9]
        assert [name for name in zero if not any(part in name for part in silent)] == []


@pytest.mark.parametrize("size", RANKS, ids="P={}".format)
def test_trunk_equals_one_device(run_ranks, summed, beyond, model, set_dropout, on_one_device, size):
    ranks = run_ranks(size, _on_rank, model, set_dropout, tuple(LENGTHS), None)
    for tokens, (outputs, gradients) in on_one_device.items():
        for rank in ranks:
            assert beyond(rank[tokens][0], outputs, 1e-10) == []
        assert beyond(summed([rank[tokens][1] for rank in ranks]), gradients, 1e-10) == []


def _mask_added_to_logits() -> None:
    """The published fault: the boolean mask is added to the bias as a number."""
    attend = triangle.attend_or_nothing

    def faulty(way):
        def added(q, k, v, bias, mask, *, dropout_p=0.0):
            return attend(way)(q, k, v, bias if mask is None else bias + mask.unsqueeze(1), None, dropout_p=dropout_p)

        return added

    triangle.attend_or_nothing = faulty


def _padding_is_attended() -> None:
    """The published fault: what fills the last rank's block up takes part as a key."""
    attend = triangle.attend_or_nothing

    def faulty(way):
        def padded(q, k, v, bias, mask, *, dropout_p=0.0):
            k, v = (torch.nn.functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
            mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=True)
            return attend(way)(q, k, v, torch.nn.functional.pad(bias, (0, 1)), mask, dropout_p=dropout_p)

        return padded

    triangle.attend_or_nothing = faulty


@pytest.mark.parametrize("fault", [_mask_added_to_logits, _padding_is_attended])
def test_a_mask_that_is_not_applied_is_found(run_ranks, beyond, model, set_dropout, on_one_device, fault):
    ranks = run_ranks(2, _on_rank, model, set_dropout, (17,), fault)
    wrong = beyond(ranks[0][17][0], on_one_device[17][0], 1e-10)
    assert any(line.startswith("pairs") for line in wrong)
