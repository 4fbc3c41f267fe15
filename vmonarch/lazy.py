"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vmonarch.requirements import unsupported_versions


def lazy_names(
    package: str, modules: Sequence[str], names: Mapping[str, str] = {}
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: its name.
        modules: which of its own modules it offers.
        names: what else it offers: name -> the module that defines it.
    """
    offered = dict.fromkeys(modules, "") | {**names}

    def resolve(name: str) -> Any:
        if name not in offered:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it offers {', '.join(sorted(offered))}"
            )
        if name != "__version__":
            for sentence in unsupported_versions().values():
                warnings.warn(sentence, stacklevel=2)
        if not offered[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(offered[name]), name)
        # Found at once from now on.
        setattr(sys.modules[package], name, value)
        return value

    return resolve, lambda: sorted({*vars(sys.modules[package]), *offered})
