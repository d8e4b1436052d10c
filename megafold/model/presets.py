"""Sizes of the model by name: keyword arguments of ``alphafold3_pytorch.Alphafold3``, readable without torch.

All presets take batches of the stock data pipeline: atoms with 3 features, atom pairs with 5, MSA rows of 32 classes
and 2 more features, 33 more features a token, templates with 108 features, 4 kinds of
modification, windows of 27 atoms.

* ``paper``: the published model, 456.7 M parameters, with the checkpointing that training at N = 384 needs.
* ``paper-0.9b``, ``paper-1.8b``: the same widths, deeper: 100 and 200 blocks of the Pairformer, 50 and 100 of the token
  transformer; 919.6 M and 1.81e9 parameters. All work grows with the blocks, so utilisation can be compared.
* ``demo``: every module of the published model, two layers each and narrow, for one CPU core.
* ``tiny``: as small as it goes with every module present, for unit tests.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from megafold.errors import InputError

_FEATURES: dict[str, Any] = {
    "dim_atom_inputs": 3,
    "dim_atompair_inputs": 5,
    "dim_template_feats": 108,
    "dim_msa_inputs": 32,
    "dim_additional_msa_feats": 2,
    "dim_additional_token_feats": 33,
    "num_molecule_types": 33,
    "num_molecule_mods": 4,
    "atoms_per_window": 27,
}

# The defaults of alphafold3-pytorch 0.8.3, written out because FLOP counts and synthetic batches read them.
_PAPER: dict[str, Any] = {
    **_FEATURES,
    "dim_template_model": 64,
    "dim_atom": 128,
    "dim_atompair": 16,
    "dim_input_embedder_token": 384,
    "dim_single": 384,
    "dim_pairwise": 128,
    "dim_token": 768,
    "sigma_data": 16,
    "num_rollout_steps": 20,
    "diffusion_num_augmentations": 48,
    "input_embedder_kwargs": {"atom_transformer_blocks": 3, "atom_transformer_heads": 4, "atom_transformer_kwargs": {}},
    "template_embedder_kwargs": {"pairformer_stack_depth": 2, "pairwise_block_kwargs": {}, "layerscale_output": True},
    "msa_module_kwargs": {
        "depth": 4,
        "dim_msa": 64,
        "outer_product_mean_dim_hidden": 32,
        "msa_pwa_dropout_row_prob": 0.15,
        "msa_pwa_heads": 8,
        "msa_pwa_dim_head": 32,
        "pairwise_block_kwargs": {},
        "layerscale_output": True,
    },
    "pairformer_stack": {
        "depth": 48,
        "pair_bias_attn_dim_head": 64,
        "pair_bias_attn_heads": 16,
        "dropout_row_prob": 0.25,
        "pairwise_block_kwargs": {},
    },
    "diffusion_module_kwargs": {
        "single_cond_kwargs": {"num_transitions": 2, "transition_expansion_factor": 2},
        "pairwise_cond_kwargs": {"num_transitions": 2},
        "atom_encoder_depth": 3,
        "atom_encoder_heads": 4,
        "token_transformer_depth": 24,
        "token_transformer_heads": 16,
        "atom_decoder_depth": 3,
        "atom_decoder_heads": 4,
    },
    "confidence_head_kwargs": {"pairformer_depth": 4},
    "checkpoint_input_embedding": True,
    "checkpoint_trunk_pairformer": True,
    "checkpoint_diffusion_module": True,
    "checkpoint_confidence_head": True,
}


def _scaled(*, depth: int, heads: int, head_dim: int, augmentations: int, rollout: int, **width: int) -> dict[str, Any]:
    """The published architecture with every stack ``depth`` layers deep, widths by name, no checkpointing."""
    block = {"tri_attn_heads": heads, "tri_attn_dim_head": head_dim}
    attention = {"attn_pair_bias_kwargs": {"dim_head": head_dim}}
    pairformer = {"pair_bias_attn_dim_head": head_dim, "pair_bias_attn_heads": heads, "dropout_row_prob": 0.25}
    return {
        **_FEATURES,
        "sigma_data": 16,
        "num_rollout_steps": rollout,
        "diffusion_num_augmentations": augmentations,
        "dim_template_model": width["template"],
        "dim_atom": width["atom"],
        "dim_atompair": width["atompair"],
        "dim_input_embedder_token": width["single"],
        "dim_single": width["single"],
        "dim_pairwise": width["pairwise"],
        "dim_token": width["token"],
        "input_embedder_kwargs": {
            "atom_transformer_blocks": depth,
            "atom_transformer_heads": heads,
            "atom_transformer_kwargs": deepcopy(attention),
        },
        "template_embedder_kwargs": {
            "pairformer_stack_depth": depth,
            "pairwise_block_kwargs": dict(block),
            "layerscale_output": True,
        },
        "msa_module_kwargs": {
            "depth": depth,
            "dim_msa": width["msa"],
            "outer_product_mean_dim_hidden": width["outer"],
            "msa_pwa_dropout_row_prob": 0.15,
            "msa_pwa_heads": heads,
            "msa_pwa_dim_head": head_dim,
            "pairwise_block_kwargs": dict(block),
            "layerscale_output": True,
        },
        "pairformer_stack": {"depth": depth, **pairformer, "pairwise_block_kwargs": dict(block)},
        "diffusion_module_kwargs": {
            "dim_fourier": width["fourier"],
            "single_cond_kwargs": {"num_transitions": 2, "transition_expansion_factor": 2},
            "pairwise_cond_kwargs": {"num_transitions": 2},
            "atom_encoder_depth": depth,
            "atom_encoder_heads": heads,
            "token_transformer_depth": depth,
            "token_transformer_heads": heads,
            "atom_decoder_depth": depth,
            "atom_decoder_heads": heads,
            "atom_encoder_kwargs": deepcopy(attention),
            "atom_decoder_kwargs": deepcopy(attention),
            "token_transformer_kwargs": deepcopy(attention),
        },
        "confidence_head_kwargs": {
            "pairformer_depth": depth,
            "pairformer_kwargs": {**pairformer, "pairwise_block_kwargs": dict(block)},
        },
        "checkpoint_input_embedding": False,
        "checkpoint_trunk_pairformer": False,
        "checkpoint_diffusion_module": False,
        "checkpoint_confidence_head": False,
    }


def _deeper(pairformer: int, token_transformer: int) -> dict[str, Any]:
    """The published model with other depths of its two large stacks."""
    model = deepcopy(_PAPER)
    model["pairformer_stack"]["depth"] = pairformer
    model["diffusion_module_kwargs"]["token_transformer_depth"] = token_transformer
    return model


PRESETS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    "paper-0.9b": _deeper(100, 50),
    "paper-1.8b": _deeper(200, 100),
    "demo": _scaled(
        **{"depth": 2, "heads": 4, "head_dim": 16, "augmentations": 8, "rollout": 4},
        **{"atom": 32, "atompair": 8, "single": 64, "pairwise": 32, "token": 96},
        **{"template": 32, "msa": 32, "outer": 8, "fourier": 64},
    ),
    "tiny": _scaled(
        **{"depth": 1, "heads": 2, "head_dim": 16, "augmentations": 4, "rollout": 2},
        **{"atom": 16, "atompair": 4, "single": 24, "pairwise": 16, "token": 32},
        **{"template": 8, "msa": 8, "outer": 4, "fourier": 16},
    ),
}


def preset(name: str) -> dict[str, Any]:
    """A fresh copy of the keyword arguments of ``Alphafold3`` for the preset ``name``.

    Raises:
        InputError: for a name that is not in ``PRESETS``.
    """
    if name not in PRESETS:
        raise InputError("model", "preset", f"unknown preset {name!r}; known: {', '.join(PRESETS)}")
    return deepcopy(PRESETS[name])
