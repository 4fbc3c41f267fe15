"""Biases as products of two thin factors, for `flash_bias_attention` and `FlashBiasProcessor` (FlashBias, §3.2)."""

from vmonarch.bias.factors import SpatioTemporalDecay, alibi_factors, alibi_slopes, distance_factors, svd_factors

__all__ = [
    "SpatioTemporalDecay",
    "alibi_factors",
    "alibi_slopes",
    "distance_factors",
    "svd_factors",
]
