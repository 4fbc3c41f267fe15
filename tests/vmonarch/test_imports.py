"""Imports go one way: from the commands down to attention, and round in circles nowhere but inside `kernels`."""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vmonarch

ROOT = Path(vmonarch.__file__).parent
# What a package may not import, at the top of a file or in a function. "" is what lies beside the packages.
ABOVE = {
    "": ("pipelines", "finetune", "eval", "cli"),
    "kernels": ("configs", "pipelines", "finetune", "eval", "cli"),
    "configs": ("finetune", "eval", "cli"),
    "pipelines": ("finetune", "eval", "cli"),
    "finetune": ("eval", "cli"),
    "eval": ("cli",),
}
# `vmonarch` names what is in all of its modules. `python -m` runs a command, which nothing imports.
NAMES, COMMAND = "__init__", "__main__"


def imports(node: ast.AST, later: bool = True) -> Iterator[str]:
    """Names that a module imports, at once or later: modules, and modules with what is taken of them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module is not None and node.level == 0, "imports are absolute"
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", f"__name__ == '{COMMAND}'"):
        node = ast.Module(node.orelse, [])
    elif not later and isinstance(node, ast.FunctionDef):
        return
    for child in ast.iter_child_nodes(node):
        yield from imports(child, later)


def graph(root: Path, later: bool = True) -> dict[str, set[str]]:
    """Module of the package -> its modules that it imports, names without the package's."""
    # Not Path.rglob, which does not follow the links that a checkout has for packages.
    found = glob.glob("**/*.py", root_dir=root, recursive=True)
    files = {path.removesuffix(".py").replace(os.sep, "."): root / path for path in found}
    files = {
        name.removesuffix(f".{NAMES}"): path
        for name, path in files.items()
        if name != NAMES and name.rpartition(".")[2] != COMMAND
    }
    named = {
        name: {found.removeprefix("vmonarch.") for found in imports(ast.parse(path.read_text()), later)}
        for name, path in files.items()
    }
    return {name: {found for found in names if found in files} - {name} for name, names in named.items()}


def package(module: str) -> str:
    return module.partition(".")[0] if module.partition(".")[0] in {*ABOVE, "cli"} else ""


@pytest.fixture(scope="module")
def modules() -> dict[str, set[str]]:
    found = graph(ROOT)
    assert {package(name) for name in found} == {*ABOVE, "cli"}, "a package is missing"
    return found


def test_nothing_imports_what_is_above_it(modules):
    upward = [
        f"{name} imports {found}"
        for name, names in modules.items()
        for found in names
        if package(found) in ABOVE.get(package(name), ())
    ]
    assert not upward


def test_there_are_no_circles(modules):
    # A first launch checks kernels by calling the functions that launch them, see `kernels.common.trust`.
    outside = {name: names for name, names in modules.items() if package(name) != "kernels"}
    for part in (outside, graph(ROOT, later=False)):
        try:
            TopologicalSorter(part).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


def test_files_and_functions_are_short():
    for path in (*ROOT.glob("*.py"), *ROOT.glob("bias/*.py"), *ROOT.glob("cli/*.py")):
        text = path.read_text()
        assert len(text.splitlines()) <= 450, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"
