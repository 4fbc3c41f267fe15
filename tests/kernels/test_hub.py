"""The folder for Hugging Face's `kernels`: it loads where there is no vmonarch, and computes what vmonarch computes."""

import re
import sys

import pytest
import torch
from op_checks import in_interpreter, quiet, with_gradients

import vmonarch
from vmonarch.kernels.hub import assemble

kernels = pytest.importorskip("kernels")
_rust = pytest.importorskip("kernels._rust")

GRID = (2, 2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "kernel"
    assemble.main([str(path)])
    return path


@pytest.fixture
def kernel(folder, monkeypatch):
    """Loaded, and used, where importing vmonarch is an error."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vmonarch"]:
        monkeypatch.setitem(sys.modules, name, None)
    return kernels.get_local_kernel(folder, backend="cpu")


def tensors(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


@in_interpreter
@quiet
def test_a_loaded_kernel_computes_what_vmonarch_computes_forward_and_backward(request):
    qkv, options = tensors(1, 8, 1, 16), {"grid": GRID, "return_lse": True}
    run = lambda ops, how: lambda *x: ops.vmonarch_attention(*x, **options, implementation=how)
    expected = with_gradients(run(vmonarch, "torch"), [x.double() for x in qkv])
    found = with_gradients(run(request.getfixturevalue("kernel"), "triton"), qkv)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).norm() <= 1e-5 * y.norm()


def test_the_kernel_imports_only_its_own_files_and_has_operators_of_its_own(folder):
    build = folder / "build" / "torch-cpu"
    texts = {file.relative_to(build): file.read_text() for file in build.rglob("*.py")}
    for path, text in texts.items():
        assert "vmonarch::" not in text
        for line in text.splitlines():
            # No statement of ours that is absolute, and no relative one that leads out of the folder or nowhere.
            assert not re.match(r" *(from|import) vmonarch\b", line), path
            found = re.match(r" *from (\.+)([\w.]*) import", line)
            if found:
                assert len(found[1]) == len(path.parts), path
                place = build.joinpath(*found[2].split("."))
                assert place.is_dir() or place.with_suffix(".py").is_file(), line
    assert sum('operator(add_op_namespace_prefix("' in "".join(text.split()) for text in texts.values()) >= 5


def test_the_validators_of_kernels_accept_the_folder(folder):
    _rust.Build.open(folder)
    assert (folder / "torch-ext" / "vmonarch" / "__init__.py").is_file()
    for backend in ("cpu", "cuda"):
        build = folder / "build" / f"torch-{backend}"
        metadata = _rust.Metadata.read_from_file(build / "metadata.json")
        assert metadata.id.startswith(f"_vmonarch_{backend}_")
        digest = metadata.digest
        digest.validate(_rust.Digest.hash_variant(digest.algorithm, build))


def test_a_model_can_be_kernelized_with_the_layer(folder):
    @kernels.use_kernel_forward_from_hub("VMonarchAttention")
    class Attention(torch.nn.Module):
        def forward(self, query, key, value, grid, **options):
            return torch.zeros_like(query)

    layer = kernels.LocalLayerRepository(folder, layer_name="VMonarchAttention")
    model = torch.nn.Sequential(Attention())
    with kernels.use_kernel_mapping({"VMonarchAttention": {"cpu": layer}}):
        kernels.kernelize(model, device="cpu", mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE)
    qkv = tensors(1, 8, 1, 16)
    expected = vmonarch.vmonarch_attention(*qkv, grid=GRID, num_iterations=1)
    assert torch.equal(model[0](*qkv, GRID, num_iterations=1), expected)


def test_no_file_is_overwritten(folder, capsys):
    with pytest.raises(SystemExit):
        assemble.main([str(folder)])
    assert "folder must be new or empty" in capsys.readouterr().err
