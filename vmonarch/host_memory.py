"""Tensors of a GPU in the host's pinned memory, copied there and back beside what the GPU computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

# Tensors that belong together.
Parts = Sequence[torch.Tensor]


class Arriving(NamedTuple):
    """Tensors on their way to the GPU, and what tells that they are there."""

    parts: Parts
    event: torch.cuda.Event

    def wait(self) -> Parts:
        """The tensors, for the current stream, which waits for them; the host does not."""
        for x in self.parts:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_event(self.event)
            x.record_stream(stream)
        return self.parts


class HostMemory:
    """Copies between a GPU and pinned memory, in the order in which they are asked for, on a stream of their own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)

    def store(self, parts: Parts, places: Parts | None = None) -> Parts:
        """Copy tensors of the GPU to the host.

        Args:
            places: what an earlier call returned for tensors of these shapes; it is written to. None for new memory.
        """
        if places is None:
            places = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in parts]
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for x, place in zip(parts, places, strict=True):
                place.copy_(x, non_blocking=True)
                x.record_stream(self._stream)
        return places

    def fetch(self, places: Parts) -> Arriving:
        """Begin to copy back what `store` returned."""
        with torch.cuda.stream(self._stream):
            parts = [place.to(self.device, non_blocking=True) for place in places]
            return Arriving(parts, self._stream.record_event())


@functools.cache
def host_memory(device: torch.device) -> HostMemory:
    """That of a GPU, one for all who use it."""
    return HostMemory(device)
