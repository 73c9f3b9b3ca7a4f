"""Speculative decoding for MLX: verify loop, accept rule, sampling and the contracts."""
