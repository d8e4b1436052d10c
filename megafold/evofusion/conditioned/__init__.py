"""Conditioned blocks of the diffusion transformer (AF3 algorithms 25 and 26)."""
