"""The former place of `kernels/distributed/exchange.py`, with names that `eval` imports from here."""

from vmonarch.kernels.distributed.exchange import places_leaving, split_evenly

__all__ = ["places_leaving", "split_evenly"]
