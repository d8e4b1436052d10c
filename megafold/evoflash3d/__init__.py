"""EvoFlash-3D: attention with an additive pair bias that is broadcast over rows."""
