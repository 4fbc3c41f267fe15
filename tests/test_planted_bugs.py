"""The tests of the mathematics can fail: each bug below, planted in a copy of the package, makes them fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = "kernels/monarch/reference.py"
SOFTMAX = "kernels/flash_entropy/reference.py"
BLOCKS = "kernels/monarch/blocks.py"

# name -> (file in the package, text in it, what the bug makes of it)
BUGS = {
    "y-from-keys": (REFERENCE, "outs[1].unflatten(0, lead)", "outs[0].unflatten(0, lead)"),
    "entropy-without-z-aL": (REFERENCE, "cL = (z * aL).sum(-1) - lse", "cL = -lse"),
    "entropy-gradient-flows": (REFERENCE, "cL if entropy_grad else cL.detach()", "cL"),
    "clamp-dropped": (REFERENCE, "max(min_mass, torch.finfo(cR.dtype).tiny)", "torch.finfo(cR.dtype).tiny"),
    "cR-over-the-wrong-axis": (REFERENCE, "L.sum(-2)", "L.sum(-1)"),
    "exact-blocks-counted-twice": (REFERENCE, "Z = Z.masked_fill(exact, -torch.inf)", "pass"),
    "l-steps-never-aware": (REFERENCE, "exact_blocks(j, l) if aware else None", "None"),
    "exact-weight-forgotten": (REFERENCE, "lse_exact if aware else None", "None"),
    "padded-queries-count": (REFERENCE, "L = L * query_valid.unsqueeze(-1)", "pass"),
    "padded-keys-attended": (REFERENCE, "masked_fill(~present, -torch.inf)", "masked_fill(~present, 0.0)"),
    "scale-forgotten": (REFERENCE, "query.to(compute_dtype) * scale", "query.to(compute_dtype)"),
    "rescale-forgotten": (SOFTMAX, "row_max + torch.log(row_sum)", "torch.log(row_sum)"),
    "normalisation-forgotten": (SOFTMAX, "return lse, *(p @ value / row_sum", "return lse, *(p @ value"),
    "tail-rows-skipped": (SOFTMAX, "for r in range(0, M, rows)", "for r in range(0, max(rows, M - rows), rows)"),
    "entropy-sign": (SOFTMAX, "entropy = -(", "entropy = ("),
    "pooled-keys-count-once": (BLOCKS, "torch.log(count)", "torch.log(count.clamp(max=1))"),
    "tiles-of-equal-size": (BLOCKS, "p * H // tiles[0]", "p * (H // tiles[0])"),
    "pre-is-post": (BLOCKS, 'missing if padding == "pre" else 0', "0"),
    "second-frame-recomputed": ("exact.py", "ExactBlocks(rows=(0,),", "ExactBlocks(rows=(1,),"),
    "band-one-short": ("exact.py", "abs(l - k) <= band", "abs(l - k) < band"),
    "rounding-inward": ("kernels/monarch/api.py", "not attended.isdisjoint(block)", "attended.issuperset(block)"),
    "merge-without-shift": ("monoid.py", "torch.exp(lses - shift)", "torch.exp(lses)"),
    "merge-hides-nan": ("monoid.py", "torch.where(share == 0,", "torch.where(~(share > 0),"),
}  # fmt: skip
# The test files to run, those that look straight at the planted file first.
TESTS = {
    SOFTMAX: ["tests/kernels/test_flash_entropy.py", "tests/kernels/test_monarch.py"],
    "monoid.py": ["tests/vmonarch/test_monoid.py"],
}
DEFAULT_TESTS = ["tests/kernels/test_monarch.py"]


def run_tests(package: Path, tests: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider",
         "-p", "no:xdist", "-c", str(ROOT / "pyproject.toml"), *(str(ROOT / test) for test in tests)],
        cwd=package,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip


def copy_package(folder: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.mp4", "*.png")
    shutil.copytree(ROOT / "vmonarch", folder / "vmonarch", ignore=ignore)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name, tmp_path):
    file, text, bug = BUGS[name]
    copy_package(tmp_path)
    source = tmp_path / "vmonarch" / file
    original = source.read_text()
    assert original.count(text) >= 1, f"{file} no longer contains {text!r}"
    source.write_text(original.replace(text, bug))
    result = run_tests(tmp_path, TESTS.get(file, DEFAULT_TESTS))
    # Exit code 1 is "tests failed"; a syntax or import error would be another one.
    assert result.returncode == 1, result.stdout[-2000:]
    assert "1 failed" in result.stdout and "error" not in result.stdout.splitlines()[-1]


def test_the_untouched_copy_passes(tmp_path):
    copy_package(tmp_path)
    result = run_tests(tmp_path, sorted({test for tests in TESTS.values() for test in tests}))
    assert result.returncode == 0, result.stdout[-2000:]
