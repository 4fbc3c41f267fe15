"""A folder for Hugging Face's `kernels`, made of our ops: `python -m vmonarch.kernels.hub.assemble FOLDER`.

    FOLDER/build.toml, CARD.md, LICENSE
    FOLDER/torch-ext/vmonarch/              the sources, for kernel-builder
    FOLDER/build/torch-cpu, torch-cuda/     what `kernels` loads: the sources, `_ops.py` and `metadata.json`
    FOLDER/build/CARD.md                    where kernel-builder looks for it when it uploads

A Hub kernel must be importable from anywhere, and beside other versions of itself. So its imports are relative, and its
operators have a namespace that is made of a hash of the sources.

Source: the kernel requirements in the documentation of kernels 0.17.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
# The package vmonarch.
ROOT = HERE.parents[1]
_IMPORT = re.compile(r"^( *from )vmonarch(?=\.[\w.]+ import )", re.MULTILINE)
_OPERATOR = re.compile(r'"vmonarch::(\w+)"')
_FUTURE = "from __future__ import annotations\n"
# kernel-builder makes a file with these names, too.
_OPS = '''"""The namespace of the operators of this build."""

import torch

_NAMESPACE = "{namespace}"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """The full name of an operator."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''


def assemble(folder: Path) -> None:
    """Write the folder of a Hub kernel.

    Args:
        folder: a new one, or an empty one.

    Raises:
        FileExistsError: the folder is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"folder must be new or empty, but there are files in {folder}")
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    name, files = general["name"], sources()
    unique = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:7]
    card = (HERE / "CARD.md").read_text()
    written = {"build.toml": (HERE / "build.toml").read_text(), "LICENSE": (ROOT.parent / "LICENSE").read_text()}
    _write(folder, {**written, "CARD.md": card, "build/CARD.md": card})
    _write(folder / "torch-ext" / name, files)
    for backend in general["backends"]:
        # The name of a module and of the namespace of operators, both unique in a process.
        identity = f"_{name}_{backend}_{unique}"
        built = {**files, "_ops.py": _OPS.format(namespace=identity)}
        metadata = {
            "name": name,
            "id": identity,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": {path: _digest(text) for path, text in sorted(built.items())}},
        }
        variant = folder / "build" / f"torch-{backend}"
        _write(variant, {**built, "metadata.json": json.dumps(metadata, indent=2) + "\n"})


def sources() -> dict[str, str]:
    """Path -> text of every file of the kernel: what `package.py` needs, directly or not, and tables of options."""
    tables = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.glob("kernels/common/tables/*.json")}
    files: dict[str, str] = {}
    wanted = ["kernels/hub/package.py"]
    while wanted:
        path = wanted.pop()
        if path not in files and (ROOT / path).is_file():
            files[path] = (ROOT / path).read_text()
            wanted += _needed_by(path, files[path])
    files["__init__.py"] = files.pop("kernels/hub/package.py")
    return {path: _portable(path, text) for path, text in files.items()} | tables


def _needed_by(path: str, text: str) -> Iterator[str]:
    """Where the modules may be that a file imports, at once or later, and the packages that they are in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vmonarch."):
            module = str(node.module).removeprefix("vmonarch.").replace(".", "/")
            for place in (module, *(f"{module}/{alias.name}" for alias in node.names)):
                yield f"{place}.py"
                yield f"{place}/__init__.py"
    yield from (f"{parent.as_posix()}/__init__.py" for parent in Path(path).parents[:-1])


def _portable(path: str, text: str) -> str:
    """A file as the kernel has it: with relative imports, and operators in the namespace of the build."""
    if _OPERATOR.search(text):
        text = _OPERATOR.sub(r'add_op_namespace_prefix("\1")', text)
        text = text.replace(_FUTURE, f"{_FUTURE}\nfrom vmonarch._ops import add_op_namespace_prefix\n", 1)
    return _IMPORT.sub(rf"\1{'.' * path.count('/')}", text)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _write(folder: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vmonarch.kernels.hub.assemble",
        description="Make a folder for Hugging Face's kernels of vmonarch's ops; docs/engines.md has more.",
    )
    parser.add_argument("folder", type=Path, help="a new folder, or an empty one")
    folder = parser.parse_args(arguments).folder
    try:
        assemble(folder)
    except OSError as error:
        parser.error(str(error))
    print(folder)


if __name__ == "__main__":
    main()
