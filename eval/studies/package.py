"""Build what an index of packages takes, and check it: `python -m vmonarch.eval.studies.package`.

The archive of the sources is built, the wheel from it, and both must pass `twine check --strict`. The wheel must hold
the package with its data and nothing else, and must start when it is installed away from the repository.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "build" / "package"
# One of each kind of file that code reads or runs.
NEEDED = (
    "vmonarch/py.typed",
    "vmonarch/configs/attention/vmonarch.yaml",
    "vmonarch/configs/plans/embedded-1.00.json",
    "vmonarch/eval/render/evaluation.html.j2",
    "vmonarch/eval/vbench/requirements.txt",
    "vmonarch/kernels/monarch/r_step.py",
    "vmonarch/pipelines/embedded/transformer/diffusion_pytorch_model.safetensors",
    "vmonarch/pipelines/embedded_adapters/based.safetensors",
)
# What stays in the repository, anything at the top beside the package, and what is no file of ours.
UNWANTED = re.compile(r"vmonarch/eval/studies/|(^|/)(tests|examples|docs|__pycache__)/|^(?!vmonarch[-/])")
# Bytes; package indexes take up to 100 MB unasked.
LARGEST = 25e6


def check_wheel(path: Path) -> None:
    """Check a wheel's contents and size.

    Raises:
        ValueError: it lacks a file, has one too many, or is too large.
    """
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
    problems = [f"lacks {name}" for name in NEEDED if name not in names]
    problems += [f"has {name}" for name in names if UNWANTED.search(name)]
    if path.stat().st_size > LARGEST:
        problems.append(f"has {path.stat().st_size / 1e6:.0f} MB, more than {LARGEST / 1e6:.0f}")
    if problems:
        raise ValueError(f"{path.name} {'; '.join(problems[:10])}")


def run(*command: str | Path, folder: Path = ROOT, path: Path | None = None) -> None:
    """Run Python with arguments in a folder, with `path` before all other packages."""
    environment = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.package", description=__doc__)
    parser.parse_args(arguments)
    shutil.rmtree(OUTPUT, ignore_errors=True)
    try:
        run("-m", "build", "--outdir", OUTPUT, ROOT)
        files = sorted(OUTPUT.iterdir())
        run("-m", "twine", "check", "--strict", *files)
        (wheel,) = OUTPUT.glob("*.whl")
        check_wheel(wheel)
        with tempfile.TemporaryDirectory() as name:
            away = Path(name)
            install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target", away / "installed")
            run("-m", "pip", *install, wheel)
            run("-m", "vmonarch", "info", folder=away, path=away / "installed")
    except (subprocess.CalledProcessError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print("".join(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB\n" for path in files), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
