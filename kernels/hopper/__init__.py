"""Kernels in Gluon for Hopper (compute capability 9.0): the same stages as the portable Triton kernels, specialised."""
