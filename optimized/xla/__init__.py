"""Optimized layers in JAX alone: they run on CPU, and on any device that XLA targets."""
