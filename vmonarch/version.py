"""The version, which an installation takes from the repository's tag."""

from __future__ import annotations

import importlib.metadata

try:
    __version__ = importlib.metadata.version("vmonarch")
except importlib.metadata.PackageNotFoundError:
    # A checkout that was never installed.
    __version__ = "0+unknown"
