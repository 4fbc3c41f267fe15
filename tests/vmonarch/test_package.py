"""The package as a user meets it: cheap to import, honest about its names, safe beside Hugging Face's `kernels`."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import vmonarch
from vmonarch import requirements
from vmonarch.pipelines.environment import EXTRAS

ROOT = Path(__file__).resolve().parents[2]


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
        heavy = {"diffusers", "transformers", "accelerate", "triton", "omegaconf", "matplotlib"} & set(sys.modules)
        assert not heavy, heavy
        import torch
        start = time.perf_counter()
        vmonarch.LatentGrid, vmonarch.ExactBlocks, vmonarch.vmonarch_attention
        spent += time.perf_counter() - start
        assert spent < 1.0, spent
        # Options are checked before models are loaded.
        vmonarch.VMonarchProcessor(), vmonarch.apply
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


def test_info_looks_for_the_packages_of_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # Bounds, no packages.
    del extras["tested"]
    assert set(EXTRAS) == set(extras)
    for extra, needed in extras.items():
        packages = {re.match(r"[\w-]+", requirement)[0] for requirement in needed}
        assert set(EXTRAS[extra]) <= packages and (extra == "dev" or packages <= set(EXTRAS[extra]))
