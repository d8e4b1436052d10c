"""EvoSP-3D: the stock model over several devices, sequence parallel (pair rows) and data parallel at once."""
