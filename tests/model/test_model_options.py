"""Options of the stock constructor: each leaves loss and gradients equal to the stock model's, under every switch."""

from __future__ import annotations

import inspect

import pytest
import torch

from megafold.model.plan import Plan

EVERY_SWITCH = Plan(graphs=False)
TRANSFORMER = "token_transformer_kwargs"


class _Letters(torch.nn.Module):
    """Stands for a language model: a fixed vector for each letter, as alphafold3-pytorch registers them by name."""

    embed_dim = 6

    def __init__(self) -> None:
        super().__init__()
        self.letters = torch.nn.Embedding(40, self.embed_dim)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.letters(ids % 40)


# name -> arguments of the model, of its forward
CASES = {
    "routed-attention": (
        {
            "input_embedder_kwargs": {
                "atom_transformer_kwargs": {
                    "use_colt5_attn": True,
                    "colt5_attn_kwargs": {
                        **{"heavy_dim_head": 8, "heavy_heads": 2, "num_heavy_tokens_q": 8, "num_heavy_tokens_kv": 8}
                    },
                }
            }
        },
        {},
    ),
    "recurrent-depth-and-registers": (
        {"pairformer_stack": {"depth": 2, "recurrent_depth": 2, "num_register_tokens": 2}},
        {},
    ),
    "recurrent-depth-checkpointed": (
        {"pairformer_stack": {"recurrent_depth": 2}, "checkpoint_trunk_pairformer": True},
        {},
    ),
    "plain-outputs": (
        {
            "msa_module_kwargs": {"depth": 2, "layerscale_output": False},
            "template_embedder_kwargs": {"layerscale_output": False},
            "diffusion_module_kwargs": {"pairwise_cond_kwargs": {"num_transitions": 3}},
        },
        {},
    ),
    "gradients-through-recycling": ({"detach_when_recycling": False}, {"num_recycling_steps": 2}),
    "atomic-distogram": ({"distogram_atom_resolution": True}, {}),
    "embedded-ids": ({"num_atom_embeds": 5, "num_atompair_embeds": 4, "num_molecule_mods": None}, {}),
    "constraints": ({"constraints": ["pocket", "contact"]}, {}),
    "language-models": ({"plm_embeddings": ("letters", "letters"), "nlm_embeddings": "letters"}, {}),
    "other-losses": (
        {
            **{"loss_diffusion_weight": 2.0, "loss_distogram_weight": 0.5, "loss_confidence_weight": 0.3},
            **{"nucleotide_loss_weight": 3.0, "ligand_loss_weight": 7.0, "ignore_index": -7},
            "edm_kwargs": {"P_mean": -1.0, "karras_formulation": False, "augment_during_sampling": False},
            "distance_bins": [1.0, 4.0, 9.0],
            "pae_bins": [0.5, 2.0],
            "pde_bins": [0.5, 2.0, 8.0],
            "num_plddt_bins": 7,
        },
        {"diffusion_add_smooth_lddt_loss": True},
    ),
    "not-the-pdb": ({"pdb_training_set": False}, {}),
}
# Constructor arguments that the cases above, the presets' widths, or another file of tests vary.
ELSEWHERE = {
    "checkpoint_": "test_model_parity, test_model_parity_options",
    "dim_": "test_model_parity (atom-width-of-coordinates), test_model_presets, test_model_real_batches",
    "diffusion_candidates": "test_model_optimize: listed as not replaced",
    "diffusion_max_batch_size": "test_model_optimize: used with diffusion_candidates alone",
    "diffusion_num_augmentations": "test_model_parity (one-augmentation)",
    "stochastic_frame_average": "test_model_parity_options (frame-averaging)",
    "confidence_head_kwargs": "test_model_real_batches",
    "num_rollout_steps": "test_model_forward",
    "num_molecule_types": "a size of an embedding that stays stock",
    "atoms_per_window": "a size; windows of another size: test_model_options",
    "sigma_data": "a number that the stock preconditioning reads",
    "relative_position_encoding_kwargs": "test_model_options",
    "augment_kwargs": "read by a stock module that stays",
    "lddt_mask_": "read where the labels are made: test_model_forward",
    "weighted_rigid_align_kwargs": "empty in this version",
    "multi_chain_permutation_alignment_kwargs": "empty in this version",
    "num_dist_bins": "must equal the number of bins",
    "num_pae_bins": "not read by this version",
    "num_pde_bins": "not read by this version",
    "plm_kwargs": "of the language models themselves",
    "nlm_kwargs": "of the language models themselves",
    "verbose": "messages alone",
}


def _needs(batch: dict, kwargs: dict) -> dict:
    g = torch.Generator().manual_seed(7)
    size, atoms, tokens = *batch["atom_inputs"].shape[:2], batch["molecule_ids"].shape[1]
    if kwargs.get("num_atom_embeds"):
        batch["atom_ids"] = torch.randint(0, 5, (size, atoms), generator=g)
        batch["atompair_ids"] = torch.randint(0, 4, batch["atompair_inputs"].shape[:-1], generator=g)
    if "num_molecule_mods" in kwargs:
        del batch["is_molecule_mod"]
    if kwargs.get("constraints"):
        batch["token_constraints"] = torch.randint(-1, 3, (size, tokens, tokens, 2), generator=g).float()
    if kwargs.get("pdb_training_set") is False:
        del batch["distogram_atom_indices"]
    return batch


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request, make_batch, make_model, monkeypatch):
    from alphafold3_pytorch.nlm import NLMRegistry
    from alphafold3_pytorch.plm import PLMRegistry

    monkeypatch.setitem(PLMRegistry, "letters", _Letters)
    monkeypatch.setitem(NLMRegistry, "letters", _Letters)
    kwargs, forward = request.param
    return make_model(**kwargs), _needs(make_batch(9, 7, confidence=True, seed=6), kwargs), forward


def test_loss_and_gradients_equal_the_stock_models(case, step, step_in_float64, beyond_budget, small_chunks):
    from megafold.model.optimize import optimize

    model, batch, forward = case
    stock, exact = step(model, batch, **forward), step_in_float64(model, batch, **forward)
    report = optimize(model, EVERY_SWITCH)
    assert report.replaced["forward (asynchronous+chunked_heads)"] == 1
    assert beyond_budget(step(model, batch, **forward), stock, exact) == []


def test_every_argument_of_the_constructor_is_tested_or_named():
    from alphafold3_pytorch import Alphafold3

    varied = {name for kwargs, _ in CASES.values() for name in kwargs}
    known = inspect.signature(inspect.unwrap(Alphafold3.__init__)).parameters.keys() - {"self"}
    untested = {name for name in known - varied if not any(name.startswith(prefix) for prefix in ELSEWHERE)}
    assert untested == set()
    assert varied <= known


@pytest.mark.parametrize("reach", [(2, 1), (40, 3)], ids=["near", "far"])
def test_position_encodings_are_the_stock_models(reach):
    from alphafold3_pytorch.alphafold3 import RelativePositionEncoding

    from megafold.model.recompute import relative_positions

    encoding = RelativePositionEncoding(r_max=reach[0], s_max=reach[1], dim_out=8)
    ids = torch.randint(0, 60, (2, 50, 5), generator=torch.Generator().manual_seed(0))
    ids[..., 2:] %= 4
    assert torch.equal(
        relative_positions(encoding, additional_molecule_feats=ids), encoding(additional_molecule_feats=ids)
    )


def test_windows_of_another_size(make_batch, make_model, step, step_in_float64, beyond_budget):
    from megafold.model.optimize import optimize

    model, batch = make_model(atoms_per_window=6), make_batch(9, 7)
    atoms = batch["atom_inputs"].shape[1]
    batch["atompair_inputs"] = torch.randn(2, atoms, atoms, 5, generator=torch.Generator().manual_seed(1))
    stock, exact = step(model, batch), step_in_float64(model, batch)
    optimize(model, EVERY_SWITCH)
    assert beyond_budget(step(model, batch), stock, exact) == []
