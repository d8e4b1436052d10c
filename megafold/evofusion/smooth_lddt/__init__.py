"""Smooth lDDT loss (AF3 algorithm 27) without a tensor of all atom pairs."""
