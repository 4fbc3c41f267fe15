"""Tiny random pipelines on disk, in the layout of the hub's: what the command line's tests generate with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

SIZE = ["--height", "32", "--width", "48", "--num-frames", "9", "--steps", "2"]


@pytest.fixture(scope="session")
def folders(made_once: Any) -> Callable[[str], Path]:
    """folders(name): what `tiny_folders.save` writes under this name; not to be changed."""

    def folder(name: str) -> Path:
        import tiny_folders

        return made_once(f"pipeline-{name}", lambda path: tiny_folders.save(name, path))

    return folder


@pytest.fixture(scope="session")
def tiny_model(folders: Callable[[str], Path]) -> Path:
    return folders("t2v")


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the text-to-video pipeline that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of Based, with LoRA layers, for the tiny pipeline that has learnt something; not to be changed."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    from vmonarch import BasedProcessor, apply, save_adapter

    file = tmp_path_factory.mktemp("tiny-adapter") / "based.safetensors"
    torch.manual_seed(1)
    transformer = WanTransformer3DModel.from_pretrained(tiny_model / "transformer")
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_out.0"], init_lora_weights=False))
    apply(transformer, BasedProcessor(layers=["both", "linear"], feature_dim=8, window=(1, 3, 3)))
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".processor." in name:
                parameter += 0.3 * torch.randn_like(parameter)
    save_adapter(transformer, file)
    return file


@pytest.fixture
def shipped_adapter(tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny pipeline's adapter in the place of the embedded model's."""
    monkeypatch.setattr("vmonarch.pipelines.embedded.embedded_adapter_path", lambda: tiny_adapter)
    return tiny_adapter


class Cli:
    """Runs commands in this process, in a folder of their own, with the tiny model at a tiny size."""

    def __init__(self, folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.model, self._capsys = folder, model, capsys

    def __call__(self, *words: object, model: object | None = None, tiny: bool = True) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of `vmonarch WORDS`; `tiny` puts model and size before the words' own options."""
        from vmonarch.cli import main

        line = [str(word) for word in words]
        if tiny:
            line[1:1] = ["--model", str(model or self.model), *SIZE]
        self._capsys.readouterr()
        code = main(line)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def done(self, *words: object, **options: Any) -> str:
        """The output of `vmonarch WORDS`, which has to end well."""
        code, out, err = self(*words, **options)
        assert code == 0, err
        return out

    def outputs(self, folder: str = "outputs/generate") -> list[str]:
        """Names of all files in an output folder, hidden ones too."""
        path = self.folder / folder
        return sorted(os.listdir(path)) if path.is_dir() else []

    def records(self, folder: str = "outputs/generate") -> list[dict[str, Any]]:
        """The JSON files of an output folder, in order."""
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((self.folder / folder).glob("*.json"))]


@pytest.fixture
def cli(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line, in an empty current folder and without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return Cli(tmp_path, tiny_model, capsys)
