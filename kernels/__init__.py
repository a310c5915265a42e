"""Kernels of rljax, each beside its plain-JAX reference; imported as `rljax_kernels`."""
