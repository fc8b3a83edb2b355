"""Optimized layers on Transformer Engine and NCCL EP; importing this package imports neither."""
