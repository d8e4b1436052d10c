"""MSA operators: outer product mean and pair-weighted averaging (AF3 algorithms 9 and 10)."""
