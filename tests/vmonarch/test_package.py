"""The package as a user meets it: cheap to import, honest about its names, safe beside Hugging Face's `kernels`."""

import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import torch

import vmonarch
from vmonarch import ExactBlocks, LatentGrid
from vmonarch.pipelines.environment import EXTRAS

ROOT = Path(__file__).resolve().parents[2]


def run_python(code, *, cwd, path=()):
    program = f"import sys\nsys.path[:0] = {[str(p) for p in path]!r}\n{textwrap.dedent(code)}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


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
        assert not torch.cuda.is_initialized()
        """,
        cwd=tmp_path,
    )


def test_versions_that_are_not_supported_are_told_on_first_use(tmp_path):
    (tmp_path / "diffusers.py").touch()
    for name, version in (("diffusers", "0.35.2"), ("torch", "2.9.1+cpu"), ("triton", "3.5.0")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    run_python(
        """
        import contextlib, io, warnings
        import vmonarch
        from vmonarch.cli import main
        said = [
            "diffusers 0.35.2 is installed, vmonarch needs diffusers",
            "torch 2.9.1+cpu is installed, vmonarch needs torch",
            "triton 3.5.0 is installed, vmonarch needs triton",
        ]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert (main(["info"]), main(["generate", "a red circle"])) == (0, 1)
        assert all(what in out.getvalue() and what in err.getvalue() for what in said), err.getvalue()
        assert vmonarch.__version__ and vmonarch.LatentGrid and vmonarch.vmonarch_attention
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                raise AssertionError(vmonarch.apply)
            except ImportError as error:
                assert all(what in str(error) for what in said), error
        assert all(any(what in str(w.message) for w in warned) for what in said), warned
        """,
        cwd=tmp_path,
        path=[tmp_path],
    )


def test_every_public_name_resolves_and_has_a_docstring():
    for name in vmonarch.__all__:
        assert getattr(vmonarch, name) is not None
        if name != "__version__":
            assert getattr(vmonarch, name).__doc__
    assert set(vmonarch.__all__) <= set(dir(vmonarch))


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones():
    with pytest.raises(AttributeError, match="vmonarch_attention"):
        _ = vmonarch.vmonarch_attn
    with pytest.raises(AttributeError, match="'vmonarch.eval' has no attribute 'smilarity'; it offers .*similarity"):
        _ = vmonarch.eval.smilarity
    with pytest.raises(AttributeError, match="vmonarch.batched_guidance is gone: call the pipeline without it"):
        _ = vmonarch.batched_guidance


def test_the_root_folder_kernels_does_not_hide_the_package_of_that_name(tmp_path):
    """diffusers imports Hugging Face's `kernels`; started from the root, Python must not find our folder instead."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("REAL = True\n")
    run_python("import kernels; assert kernels.REAL", cwd=ROOT, path=["", tmp_path])
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_importing_the_package_is_enough_to_name_its_parts():
    """Started from the root, too, where diffusers must not find our folder `kernels`."""
    run_python(
        """
        import vmonarch
        vmonarch.bias.alibi_slopes, vmonarch.configs.InputError, vmonarch.finetune.export.export
        vmonarch.eval.compare.compare, vmonarch.eval.evaluate.evaluate, vmonarch.eval.similarity.similarity
        vmonarch.pipelines.embedded, vmonarch.pipelines.generation.generate
        assert {"pipelines", "VMonarchProcessor"} <= set(dir(vmonarch)) and "lpips" in dir(vmonarch.eval.similarity)
        assert "similarity" in dir(vmonarch.eval) and "generation" in dir(vmonarch.pipelines)
        """,
        cwd=ROOT,
    )


def test_info_looks_for_the_packages_of_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    # Bounds, no packages.
    del extras["tested"]
    assert set(EXTRAS) == set(extras)
    for extra, requirements in extras.items():
        packages = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
        assert set(EXTRAS[extra]) <= packages and (extra == "dev" or packages <= set(EXTRAS[extra]))


def test_a_latent_grid_counts_its_tokens():
    grid = LatentGrid(5, 3, 7)
    assert (grid.tokens_per_frame, grid.tokens) == (21, 105)
    assert LatentGrid.parse([5, 3, 7]) == grid == LatentGrid.parse(torch.Size((5, 3, 7)))


def test_exact_blocks_are_the_union_of_rows_columns_and_band():
    assert ExactBlocks(rows=(1,), columns=[3, 0], band=0).key_frames(4) == ((0, 3), (0, 1, 2, 3), (0, 2, 3), (0, 3))
    assert ExactBlocks().key_frames(2) == ((), ())
    assert ExactBlocks(rows=2) == ExactBlocks(rows=[2, 2]) and hash(ExactBlocks(rows=range(2)))
