"""Attention of atoms within their window and the one before (AF3 algorithm 7 with local blocks)."""
