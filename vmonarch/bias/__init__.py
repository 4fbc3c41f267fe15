"""Biases as products of two thin factors, for `flash_bias_attention` and `FlashBiasProcessor` (FlashBias, §3.2).

closed_form.py    ALiBi, squared distance, decay over space and time
svd.py            a given matrix per head, by its singular values
"""

from vmonarch.bias.closed_form import SpatioTemporalDecay, alibi_factors, alibi_slopes, distance_factors
from vmonarch.bias.svd import LowRankBias, low_rank_bias_attention, svd_factors

__all__ = [
    "LowRankBias",
    "SpatioTemporalDecay",
    "alibi_factors",
    "alibi_slopes",
    "distance_factors",
    "low_rank_bias_attention",
    "svd_factors",
]
