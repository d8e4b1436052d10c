"""EvoFlash-3D for NVIDIA Hopper (sm_90), 16-bit inputs with a bias: the kernels of the parent package in Gluon."""
