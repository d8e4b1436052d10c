"""MegaFold: efficient training of 3D-attention protein models (La, Gupta, Morehead, Cheng, Zhang 2026)."""
