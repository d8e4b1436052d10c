"""LayerNorm followed by several projections."""
