"""EvoFusion: what surrounds the attention in AlphaFold3-class models, with few round trips to device memory.

One package an operator: `api` (the public function), `reference` (its eager definition), `kernels` and `launch`:

- `norm_project.api.norm_project`: LayerNorm and several projections of it.
- `transition.api.transition`: LayerNorm, SwiGLU transition, residual.
- `triangle_multiplication.api.triangle_multiplication`: outgoing and incoming.
- `attention_output.api.attention_output`: output gate, projection, shared dropout, residual.
- `conditioned.api.adaptive_norm`, `condition_gate`, `conditioned_transition`: blocks of the diffusion transformer.
- `windowed_attention.api.windowed_attention`: atoms that see their window and the one before.
- `msa.api.outer_product_mean`, `pair_weighted_averaging`.
- `smooth_lddt.api.smooth_lddt_loss`.

Products run in the autocast dtype where autocast is on, else in the dtype of the first argument; weights may be fp32 in
both cases. Statistics, sums and weight gradients are fp32. Devices without a supported Triton run the references.
"""
