"""The former place of frame-parallel attention, now in `kernels/distributed`; its public names stay importable."""

from vmonarch.kernels.distributed.api import frame_parallel_vmonarch_attention
from vmonarch.kernels.distributed.exact import ExactRoutes, exact_routes
from vmonarch.kernels.distributed.traffic import frame_parallel_bytes, ulysses_bytes

__all__ = ["ExactRoutes", "exact_routes", "frame_parallel_bytes", "frame_parallel_vmonarch_attention", "ulysses_bytes"]
