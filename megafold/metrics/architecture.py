"""Every width and depth of an `alphafold3_pytorch.Alphafold3`, resolved from the keyword arguments that build it.

The stock constructor takes nested dictionaries, and a nested dictionary that is given replaces the default one as a
whole; what it leaves out falls back to the default of the inner module. The inner defaults equal the outer ones, so a
plain merge gives the built model (a test compares both with the installed package).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_UNSUPPORTED = {
    "constraints": None,
    "diffusion_candidates": 1,
    "distogram_atom_resolution": False,
    "nlm_embeddings": None,
    "num_atom_embeds": None,
    "num_atompair_embeds": None,
    "plm_embeddings": None,
    "stochastic_frame_average": False,
}


@dataclass(frozen=True)
class PairBlock:
    """Widths of one `PairwiseBlock` (pair width C, hidden width of the triangle update, H heads of D)."""

    dim: int
    tri_mult_dim_hidden: int
    tri_attn_heads: int
    tri_attn_dim_head: int


@dataclass(frozen=True)
class Stack:
    """A `DiffusionTransformer` (token, atom encoder or atom decoder) or the single track of a `PairformerStack`."""

    depth: int
    heads: int
    dim_head: int
    expansion: float = 2.0


@dataclass(frozen=True)
class Architecture:
    """The resolved model. Names follow the stock constructor; `trunk`, `confidence` and the like are its parts."""

    dim_atom_inputs: int
    dim_template_feats: int
    dim_template_model: int = 64
    atoms_per_window: int = 27
    dim_atom: int = 128
    dim_atompair_inputs: int = 5
    dim_atompair: int = 16
    dim_input_embedder_token: int = 384
    dim_single: int = 384
    dim_pairwise: int = 128
    dim_token: int = 768
    dim_msa_inputs: int = 32
    dim_additional_msa_feats: int = 2
    dim_additional_token_feats: int = 33
    num_molecule_types: int = 33
    num_molecule_mods: int = 4
    num_dist_bins: int = 64
    num_plddt_bins: int = 50
    num_pae_bins: int = 64
    num_pde_bins: int = 64
    num_rollout_steps: int = 20
    diffusion_num_augmentations: int = 48
    checkpoint_input_embedding: bool = False
    checkpoint_trunk_pairformer: bool = False
    checkpoint_distogram_head: bool = False
    checkpoint_confidence_head: bool = False
    checkpoint_diffusion_module: bool = False
    r_max: int = 32
    s_max: int = 2
    dim_fourier: int = 256
    dim_msa: int = 64
    msa_depth: int = 4
    msa_outer_hidden: int = 32
    msa_heads: int = 8
    msa_dim_head: int = 32
    single_transitions: int = 2
    single_expansion: float = 2.0
    pair_transitions: int = 2
    pair_expansion: float = 2.0
    template_depth: int = 2
    max_num_msa: int | None = None
    trunk: Stack = field(default_factory=lambda: Stack(48, 16, 64))
    confidence: Stack = field(default_factory=lambda: Stack(4, 16, 64))
    input_atoms: Stack = field(default_factory=lambda: Stack(3, 4, 64))
    atom_encoder: Stack = field(default_factory=lambda: Stack(3, 4, 64))
    atom_decoder: Stack = field(default_factory=lambda: Stack(3, 4, 64))
    token_transformer: Stack = field(default_factory=lambda: Stack(24, 16, 64))
    trunk_pair: PairBlock = field(default_factory=lambda: PairBlock(128, 128, 4, 32))
    confidence_pair: PairBlock = field(default_factory=lambda: PairBlock(128, 128, 4, 32))
    msa_pair: PairBlock = field(default_factory=lambda: PairBlock(128, 128, 4, 32))
    template_pair: PairBlock = field(default_factory=lambda: PairBlock(64, 64, 4, 32))

    @property
    def dim_single_inputs(self) -> int:
        """Width of the input embedder's token features: pooled atoms and the extra token features (417 by default)."""
        return self.dim_input_embedder_token + self.dim_additional_token_feats

    @property
    def dim_condition(self) -> int:
        """Width of the token transformer's condition: trunk single and input features (801 by default)."""
        return self.dim_single + self.dim_single_inputs

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any]) -> Architecture:
        """Resolve constructor keyword arguments.

        Raises:
            ValueError: for an option that changes the computation in a way that is not modelled here, by name.
        """
        given = dict(kwargs)
        for name, default in _UNSUPPORTED.items():
            if given.get(name, default) not in (default, 0):
                raise ValueError(f"{name}={given[name]!r}: this option of the stock model is not modelled")
        resolved = {name: given[name] for name in cls.__dataclass_fields__ if name in given}
        resolved["num_molecule_mods"] = given.get("num_molecule_mods", 4) or 0
        for bins, name in (
            ("distance_bins", "num_dist_bins"),
            ("pae_bins", "num_pae_bins"),
            ("pde_bins", "num_pde_bins"),
        ):
            if bins in given:
                resolved[name] = len(given[bins])
        if resolved.get("num_dist_bins", 64) is None:
            del resolved["num_dist_bins"]

        width = given.get("dim_pairwise", 128)
        position = given.get("relative_position_encoding_kwargs", {})
        resolved.update(r_max=position.get("r_max", 32), s_max=position.get("s_max", 2))

        embedder = given.get("input_embedder_kwargs", {})
        resolved["input_atoms"] = _transformer(
            embedder.get("atom_transformer_blocks", 3),
            embedder.get("atom_transformer_heads", 4),
            embedder.get("atom_transformer_kwargs", {}),
        )

        template = given.get("template_embedder_kwargs", {})
        resolved["template_depth"] = template.get("pairformer_stack_depth", 2)
        template_width = given.get("dim_template_model", 64)
        resolved["template_pair"] = _pair_block(template_width, template.get("pairwise_block_kwargs", {}))

        msa = given.get("msa_module_kwargs", {})
        resolved.update(
            msa_depth=msa.get("depth", 4),
            dim_msa=msa.get("dim_msa", 64),
            msa_outer_hidden=msa.get("outer_product_mean_dim_hidden", 32),
            msa_heads=msa.get("msa_pwa_heads", 8),
            msa_dim_head=msa.get("msa_pwa_dim_head", 32),
            max_num_msa=msa.get("max_num_msa"),
            msa_pair=_pair_block(width, msa.get("pairwise_block_kwargs", {})),
        )

        trunk = given.get("pairformer_stack", {})
        resolved.update(
            trunk=_single_track(trunk, 48), trunk_pair=_pair_block(width, trunk.get("pairwise_block_kwargs", {}))
        )

        head = given.get("confidence_head_kwargs", {})
        inner = {"depth": head.get("pairformer_depth", 4), **head.get("pairformer_kwargs", {})}
        resolved["confidence"] = _single_track(inner, 4)
        resolved["confidence_pair"] = _pair_block(width, inner.get("pairwise_block_kwargs", {}))

        diffusion = given.get("diffusion_module_kwargs", {})
        if diffusion.get("use_linear_attn"):
            raise ValueError("diffusion_module_kwargs.use_linear_attn: this option of the stock model is not modelled")
        single = diffusion.get("single_cond_kwargs", {})
        pair = diffusion.get("pairwise_cond_kwargs", {})
        resolved.update(
            dim_fourier=diffusion.get("dim_fourier", 256),
            single_transitions=single.get("num_transitions", 2),
            single_expansion=single.get("transition_expansion_factor", 2),
            pair_transitions=pair.get("num_transitions", 2),
            pair_expansion=pair.get("transition_expansion_factor", 2),
        )
        for name, depth, heads in (("atom_encoder", 3, 4), ("atom_decoder", 3, 4), ("token_transformer", 24, 16)):
            resolved[name] = _transformer(
                diffusion.get(f"{name}_depth", depth),
                diffusion.get(f"{name}_heads", heads),
                diffusion.get(f"{name}_kwargs", {}),
            )
        return cls(**resolved)


def _pair_block(width: int, kwargs: Mapping[str, Any]) -> PairBlock:
    hidden = kwargs.get("tri_mult_dim_hidden")
    return PairBlock(
        width,
        width if hidden is None else hidden,
        kwargs.get("tri_attn_heads", 4),
        kwargs.get("tri_attn_dim_head", 32),
    )


def _single_track(kwargs: Mapping[str, Any], depth: int) -> Stack:
    for name in ("num_register_tokens", "add_value_residual"):
        if kwargs.get(name):
            raise ValueError(f"{name}={kwargs[name]!r}: this option of the stock model is not modelled")
    return Stack(
        kwargs.get("depth", depth) * kwargs.get("recurrent_depth", 1),
        kwargs.get("pair_bias_attn_heads", 16),
        kwargs.get("pair_bias_attn_dim_head", 64),
    )


def _transformer(depth: int, heads: int, kwargs: Mapping[str, Any]) -> Stack:
    for name in (
        "num_register_tokens",
        "add_value_residual",
        "use_linear_attn",
        "use_colt5_attn",
        "attn_num_memory_kv",
    ):
        if kwargs.get(name):
            raise ValueError(f"{name}={kwargs[name]!r}: this option of the stock model is not modelled")
    attention = kwargs.get("attn_pair_bias_kwargs", {})
    return Stack(depth, heads, attention.get("dim_head", 64), kwargs.get("trans_expansion_factor", 2))
