"""The package: cheap to import, honest about its names, safe beside Hugging Face's `kernels`; imports go one way."""

from __future__ import annotations

import ast
import glob
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import vmonarch
from vmonarch import requirements

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(vmonarch.__file__).parent


def run_python(code, *, cwd, path=()):
    program = f"import sys\nsys.path[:0] = {[str(p) for p in path]!r}\n{textwrap.dedent(code)}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.deep
def test_importing_the_package_loads_little_and_costs_under_a_second_beyond_torch(tmp_path):
    run_python(
        """
        import sys, time
        start = time.perf_counter()
        import vmonarch
        spent = time.perf_counter() - start
        heavy = {"diffusers", "transformers", "accelerate", "triton", "yaml", "matplotlib"} & set(sys.modules)
        assert not heavy, heavy
        import torch
        start = time.perf_counter()
        vmonarch.LatentGrid, vmonarch.ExactBlocks, vmonarch.vmonarch_attention
        spent += time.perf_counter() - start
        assert spent < 1.0, spent
        # Options are checked before models are loaded.
        from vmonarch.configs.methods import resolve_method
        resolve_method("fast").processor()
        assert "diffusers" not in sys.modules
        assert not torch.cuda.is_initialized()
        """,
        cwd=tmp_path,
    )


def test_a_version_that_is_not_supported_is_told_on_first_use(monkeypatch):
    version = requirements.importlib.metadata.version
    told = lambda name: "0.35.2" if name == "diffusers" else version(name)
    monkeypatch.setattr(requirements.importlib.metadata, "version", told)
    anew = requirements.unsupported_versions.__wrapped__
    for module in (requirements, vmonarch):
        monkeypatch.setattr(module, "unsupported_versions", anew)
    monkeypatch.delitem(vars(vmonarch), "LatentGrid", raising=False)
    with pytest.warns(UserWarning, match=r"diffusers 0\.35\.2 is installed, vmonarch needs diffusers[<>=]"):
        assert vmonarch.LatentGrid
    with pytest.raises(requirements.UnsupportedVersion, match=r"diffusers 0\.35\.2"):
        requirements.check_versions()


def test_every_public_name_resolves_and_has_a_docstring():
    for name in vmonarch.__all__:
        assert getattr(vmonarch, name) is not None
        if name != "__version__":
            assert getattr(vmonarch, name).__doc__
    assert set(vmonarch.__all__) <= set(dir(vmonarch))


def test_the_root_folder_kernels_does_not_hide_the_package_of_that_name(tmp_path):
    """diffusers imports Hugging Face's `kernels`; started from the root, Python must not find our folder instead."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = True\n")
    run_python("import kernels; assert kernels.REAL", cwd=ROOT, path=["", tmp_path])
    assert not (ROOT / "kernels" / "__init__.py").exists()


# Imports go one way: from the commands down to attention, and round in circles nowhere but inside `kernels`.

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
    found = graph(PACKAGE)
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
    for part in (outside, graph(PACKAGE, later=False)):
        try:
            TopologicalSorter(part).prepare()
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))
