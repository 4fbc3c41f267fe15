"""An evaluation with pictures, in a folder of its own: the library behind `vmonarch compare`.

from vmonarch.eval.compare import CompareConfig, compare

comparison = compare(CompareConfig(prompts=("a red circle moving right",), methods=("vmonarch", "vmonarch-t1")))
print(comparison.table())
"""

from __future__ import annotations

from vmonarch.eval.evaluate import evaluate as compare
from vmonarch.eval.settings import CompareConfig

__all__ = ["CompareConfig", "compare"]
