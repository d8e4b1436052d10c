"""EvoFusion: normalisation, projections, gates and products around the attention, fused."""
