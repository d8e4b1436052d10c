"""LayerNorm and SwiGLU transition (AF3 algorithm 11)."""
