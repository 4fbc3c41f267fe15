"""The gate before the clock: what is wrong is not timed, and what fails says why."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Relative errors (Frobenius norm) that a dtype may have against the float32 reference; of any single row, 10 × as much.
BOUNDS = {
    torch.bfloat16: {"out": 2e-2, "gradient": 5e-2},
    torch.float16: {"out": 4e-3, "gradient": 1e-2},
    torch.float32: {"out": 1e-4, "gradient": 1e-3},
}
# Of a whole transformer, so above those of one kernel.
MODEL_BOUNDS = {torch.bfloat16: 5e-2, torch.float32: 1e-3}
ROW_FACTOR = 10
NAMES = ("out", "dq", "dk", "dv")


class WrongResultError(RuntimeError):
    """A kernel gave a result outside the stated bounds, or failed: the run measured something else than attention."""


def relative_errors(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Relative errors in the Frobenius norm: of all, and the largest of any row [..., D] (no row counts as small)."""
    difference = torch.linalg.vector_norm(found.float() - expected, dim=-1)
    norms = torch.linalg.vector_norm(expected, dim=-1)
    typical = norms.square().mean().sqrt().clamp_min(1e-30)
    return {
        "relative": (difference.square().mean().sqrt() / typical).item(),
        "row": (difference / norms.clamp_min(typical)).max().item(),
    }


def compare(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    bounds: Mapping[str, float] | None = None,
) -> tuple[dict[str, dict[str, float]], str]:
    """(`relative_errors` by name, what is wrong with them; empty if nothing).

    Args:
        bounds: relative errors that are allowed, in place of those of the dtype, where names of gradients begin with a
            d; an error without one is only told.
    """
    errors = {name: relative_errors(x, expected[name]) for name, x in found.items() if name in expected}
    problems = []
    for name, error in errors.items():
        if bounds is not None and name not in bounds:
            continue
        most = BOUNDS[dtype]["gradient" if name.startswith("d") else "out"] if bounds is None else bounds[name]
        # Written so that NaN is wrong too.
        if not error["relative"] <= most:
            problems.append(f"{name} is off by {error['relative']:.2g} (at most {most:.2g})")
        elif bounds is None and not error["row"] <= ROW_FACTOR * most:
            problems.append(f"a row of {name} is off by {error['row']:.2g} (at most {ROW_FACTOR * most:.2g})")
    return errors, "; ".join(problems)


def failure(error: Exception) -> dict[str, str]:
    """The status and the problem of a way that failed; an error that lost the device is raised again."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    # Nothing that is measured later would be right.
    if "CUDA error" in str(error) and not out_of_memory:
        raise error
    problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300] or type(error).__name__}"
    return {"status": "out of memory" if out_of_memory else "failed", "problem": problem}
