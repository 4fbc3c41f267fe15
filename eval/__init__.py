"""Metrics, comparisons and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vmonarch.lazy import lazy_names

if TYPE_CHECKING:
    from vmonarch.eval import compare as compare
    from vmonarch.eval import evaluate as evaluate
    from vmonarch.eval import similarity as similarity

__getattr__, __dir__ = lazy_names(__name__, modules=("compare", "evaluate", "similarity"))
