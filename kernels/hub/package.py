"""VMonarch attention: structured attention for video diffusion transformers, forward and backward."""

from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.hub import layers
from vmonarch.kernels.merge.api import merge_partials
from vmonarch.kernels.monarch.api import monarch_attention, vmonarch_attention
from vmonarch.options import ExactBlocks, VMonarchOptions

__all__ = [
    "ExactBlocks",
    "LatentGrid",
    "VMonarchOptions",
    "flash_bias_attention",
    "flash_entropy_attention",
    "layers",
    "merge_partials",
    "monarch_attention",
    "vmonarch_attention",
]
