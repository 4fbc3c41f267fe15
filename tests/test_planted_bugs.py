"""The tests can fail: each bug of planted_bugs.toml, planted in a copy, makes the test that is named beside it fail."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUGS = tomllib.loads((ROOT / "tests" / "planted_bugs.toml").read_text(encoding="utf-8"))["bugs"]
# Of kernels that only a GPU runs: their bugs are planted there.
ON_GPU = {name for name, planted in BUGS.items() if "::test_gpu_" in planted["test"]}
# What tests import of others, once for all bugs.
MODULES = ("pytest", "triton.runtime.interpreter", "triton.experimental.gluon", "gradio",
           "accelerate", "peft", "imageio_ffmpeg", "pyarrow.parquet", "pyarrow.compute", "torch.utils.flop_counter",
           *map("diffusers.{}".format, ("training_utils", "guiders", "modular_pipelines.wan", "pipelines.ltx2")),
           *map("diffusers.pipelines.{}".format, (
               "wan.pipeline_wan_i2v", "hunyuan_video.pipeline_hunyuan_video_framepack", "ltx.pipeline_ltx",
               "cosmos.pipeline_cosmos2_5_predict", "consisid.pipeline_consisid")))  # fmt: skip


@pytest.fixture(scope="module")
def run_tests(start_forks):
    """(exit code, output) of tests of `make test`, or of such that need a GPU, that see the package in a folder."""
    # By themselves, lest they take what an earlier run has made for all processes.
    alone = {"PYTEST_XDIST_WORKER": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    here = (name for name in MODULES if find_spec(name.partition(".")[0]))
    run = start_forks(*here, OMP_NUM_THREADS="1", **alone)

    def run_tests(package: Path, *tests: str) -> tuple[int, str]:
        tier = "gpu" if all("::test_gpu_" in test for test in tests) else "not deep and not gpu"
        words = ("-x", "-q", "-m", tier, "-p", "no:cacheprovider", "-c", ROOT / "pyproject.toml")
        # To show the source of all frames, pytest parses their files: half of the time of a bug.
        words += ("--tb", "native")
        if tier == "gpu":
            # CUDA cannot be used in a fork of a process that has counted its GPUs.
            command = [sys.executable, "-m", "pytest", *words, *(str(ROOT / test) for test in tests)]
            done = subprocess.run(command, cwd=package, env={**os.environ, **alone}, capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr
        return run(package, "pytest", *words, *(ROOT / test for test in tests))

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


@pytest.mark.parametrize("of, gpu", [
    pytest.param("/test_", False, id="folders"),
    pytest.param("[", False, id="tests", marks=pytest.mark.deep),
    pytest.param("[", True, id="gpu", marks=pytest.mark.gpu)])  # fmt: skip
def test_the_untouched_copy_passes(run_tests, package, of, gpu):
    """One test of each folder, or one case of each test: what a copy may lack is the same for all."""
    tests = [planted["test"] for name, planted in BUGS.items() if (name in ON_GPU) == gpu]
    code, output = run_tests(package, *sorted({test.partition(of)[0]: test for test in tests}.values()))
    assert code == 0, output[-2000:]


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.gpu) if x in ON_GPU else x for x in BUGS])
def test_a_planted_bug_is_caught(run_tests, package, plant, name):
    planted = BUGS[name]
    plant(planted["file"], planted["text"], planted["bug"])
    code, output = run_tests(package, planted["test"])
    # Exit code 1 is "tests failed"; a syntax or import error is another one, and so is a test outside of `make test`.
    assert code == 1, output[-2000:]
    assert "1 failed" in output and "error" not in output.splitlines()[-1]
    # Nor may the bug be no more than a name that is not there.
    assert not re.search(r"^(\S.*)?(NameError|ImportError|ModuleNotFoundError)", output, re.M), output
