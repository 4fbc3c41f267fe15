"""The tests can fail: each bug of planted_bugs.toml, planted in a copy, makes those that look at it fail."""

import os
import re
import shutil
import tomllib
from importlib.util import cache_from_source
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = tomllib.loads((ROOT / "tests" / "planted_bugs.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run_tests(start_forks):
    """(exit code, output) of tests that see the copy of the package in a folder."""
    modules = ("pytest", "hypothesis", "triton.runtime.interpreter", "triton.experimental.gluon")
    modules += ("accelerate", "peft", "omegaconf", "pyarrow.parquet", "diffusers.pipelines.wan.pipeline_wan")
    run = start_forks(*modules, OMP_NUM_THREADS="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    def run_tests(package: Path, tests: list[str], keyword: str = "") -> tuple[int, str]:
        return run(
            package, "pytest", "-x", "-q", "-m", "not slow and not gpu", "-k", keyword,
            "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml",
            *(ROOT / test for test in tests),
        )  # fmt: skip

    return run_tests


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of all of it, lest a test fail for what is missing; what is not source, and large, is linked."""
    folder = tmp_path_factory.mktemp("copy")
    copy = lambda source, to: (shutil.copy2 if source.endswith(".py") else os.symlink)(source, to)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vmonarch", folder / "vmonarch", ignore=ignore, copy_function=copy)
    return folder


@pytest.fixture
def plant(package):
    """plant(file, text, bug), until the test ends; what Python has compiled of all other files stays."""
    planted = []

    def plant(file: str, text: str, bug: str) -> None:
        source = package / "vmonarch" / file
        original = source.read_text()
        assert original.count(text) >= 1, f"{file} no longer contains {text!r}"
        planted.append(file)
        forget(source)
        # It may be a link to the file itself.
        source.unlink()
        source.write_text(original.replace(text, bug))

    def forget(source: Path) -> None:
        # A compiled file counts as fresh if the source has its size and the second of its last change.
        Path(cache_from_source(source)).unlink(missing_ok=True)

    yield plant
    for file in planted:
        shutil.copy2(ROOT / "vmonarch" / file, package / "vmonarch" / file)
        forget(package / "vmonarch" / file)


FAULTS = [pytest.param(name, marks=pytest.mark.deep) for name in TABLE["faults"]]


@pytest.mark.parametrize("name", [*TABLE["bugs"], *FAULTS])
def test_a_planted_bug_is_caught(run_tests, package, plant, name):
    planted = (TABLE["bugs"] | TABLE["faults"])[name]
    plant(planted["file"], planted["text"], planted["bug"])
    tests = planted.get("tests") or TABLE["tests"].get(planted["file"], TABLE["tests"]["default"])
    code, output = run_tests(package, tests, planted.get("keyword", ""))
    # Exit code 1 is "tests failed"; a syntax or import error would be another one.
    assert code == 1, output[-2000:]
    assert "1 failed" in output and "error" not in output.splitlines()[-1]
    # Nor may the bug be no more than a name that is not there.
    assert not re.search(r"^E .*(NameError|ImportError|ModuleNotFoundError)", output, re.M), output


def test_the_untouched_copy_passes(run_tests, package):
    # Of the kernels' and processors' tests, which are slow, some that catch bugs above.
    slow = {
        "tests/kernels/test_monarch_triton.py",
        "tests/kernels/test_flash_bias.py",
        "tests/kernels/test_taylor.py",
        "tests/kernels/test_window.py",
        "tests/kernels/test_two_resolution.py",
        "tests/kernels/test_every_op.py",
        "tests/kernels/test_norm_rotary.py",
        "tests/processors/test_based.py",
        "tests/processors/test_adapters.py",
        "tests/finetune/test_data_loader.py",
        "tests/finetune/test_checkpoints.py",
        "tests/finetune/test_trainer.py",
        "tests/processors/test_plan.py",
        "tests/eval/test_controls.py",
        "tests/processors/test_context_parallel.py",
        "tests/processors/test_refresh.py",
        "tests/kernels/test_flash_entropy.py",
    }
    others = {test for tests in TABLE["tests"].values() for test in tests} - slow
    some = "paper or strong-clamp or own-frame or ragged-triton or 7-40-5 or average or copies or missing"
    some += " or the_kernels_are and taylor-causal and not lse or many-tokens and float32"
    some += " or strided_inputs or a_dropped_caption or flipped or every_head or flops or holds_the_terms"
    some += " or definition or the_kernels_compute or linear_attention_refuses"
    some += " or (a_resumed_run_is_the_same_run and t2v-0) or breaks_off"
    for tests, keyword in ((others, ""), (slow, f"({some}) and not its_variant")):
        code, output = run_tests(package, sorted(tests), keyword)
        assert code == 0, output[-2000:]
