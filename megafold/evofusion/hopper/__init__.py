"""EvoFusion's kernels over rows for sm_90, in Gluon: weights stay in shared memory, rows stream past them."""
