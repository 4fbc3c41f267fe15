"""Options that are gone: files of before may have them, as long as they changed nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vmonarch.configs import InputError

# Name -> (the value that changed nothing, what to do in place of another).
GONE = {
    "parallel_by": ("heads", "ranks always share heads; leave it out"),
    "batch_guidance": (False, "guidance takes two forward calls a step; leave it out"),
}


def without_gone(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`values` without options that are gone.

    Args:
        prefix: put before an option's name in the error.

    Raises:
        InputError: one of them has a value that changed something.
    """
    for name, (usual, now) in GONE.items():
        if values.get(name, usual) != usual:
            raise InputError(prefix + name, f"is gone, got {values[name]!r}: {now}")
    return {name: value for name, value in values.items() if name not in GONE}
