"""Installed versions: vmonarch's own, and whether others satisfy its metadata, which comes from pyproject.toml."""

from __future__ import annotations

import functools
import importlib.metadata

# The version of a checkout that was never installed.
_UNKNOWN = "0+unknown"
try:
    # An installation takes it from the repository's tag.
    __version__ = importlib.metadata.version("vmonarch")
except importlib.metadata.PackageNotFoundError:
    __version__ = _UNKNOWN

# vmonarch uses private parts of these, or other versions of them compute something else.
CHECKED = ("torch", "triton", "diffusers")


class UnsupportedVersion(ImportError):
    """An installed version is one that vmonarch cannot use."""


@functools.cache
def unsupported_versions() -> dict[str, str]:
    """By distribution, a sentence on its version if vmonarch does not support that; imports nothing.

    A missing distribution counts as supported: its import fails anyway.
    """
    from packaging.requirements import Requirement
    from packaging.version import Version

    found: dict[str, str] = {}
    needed = None if __version__ == _UNKNOWN else importlib.metadata.requires("vmonarch")
    for requirement in map(Requirement, needed or ()):
        name, specifier, marker = requirement.name, requirement.specifier, requirement.marker
        if name not in CHECKED or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        # A build from the sources before a release counts as that release.
        if not specifier.contains(Version(version).base_version):
            found[name] = f"{name} {version} is installed, vmonarch needs {name}{specifier}"
    return found


def check_versions() -> None:
    """Check the versions before anything that needs them is imported.

    Raises:
        UnsupportedVersion: vmonarch needs other versions.
    """
    if found := unsupported_versions():
        raise UnsupportedVersion("; ".join(found.values()))
