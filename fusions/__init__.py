"""Fused projections and the native kernels they run on. Usable without the stress framework."""
