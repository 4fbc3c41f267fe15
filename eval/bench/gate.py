"""The gate before the clock: what is wrong is not timed, and what fails says why."""

from __future__ import annotations

from typing import Any

import torch

# Relative errors (Frobenius norm) that a dtype may have against the float32 reference; of any single row, 10 × as much.
BOUNDS = {
    torch.bfloat16: {"out": 2e-2, "gradient": 5e-2},
    torch.float16: {"out": 4e-3, "gradient": 1e-2},
    torch.float32: {"out": 1e-4, "gradient": 1e-3},
}
ROW_FACTOR = 10


class WrongResultError(RuntimeError):
    """A kernel gave a result outside the stated bounds, or failed: the run measured something else than attention."""


NAMES = ("out", "dq", "dk", "dv")


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Relative errors in the Frobenius norm: of all, and the largest of any row [..., D] (no row counts as small)."""
    difference = torch.linalg.vector_norm(found.float() - expected, dim=-1)
    norms = torch.linalg.vector_norm(expected, dim=-1)
    typical = norms.square().mean().sqrt().clamp_min(1e-30)
    return {
        "relative": (difference.square().mean().sqrt() / typical).item(),
        "row": (difference / norms.clamp_min(typical)).max().item(),
    }


def failure(error: Exception) -> dict[str, Any]:
    memory = isinstance(error, torch.OutOfMemoryError)
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return {"status": "out of memory" if memory else "failed", "problem": f"{type(error).__name__}: {text}"}
