"""A tiny random Wan pipeline on disk, in the layout of the hub's: what the command line's tests generate with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = "a an the red green blue circle square moving left right up down over on plain background slowly".split()
SIZE = ["--height", "32", "--width", "48", "--num-frames", "9", "--steps", "2"]


def build_pipeline(folder: Path, *, image_to_video: bool = False, **options: Any) -> Path:
    """Save a random two-layer Wan pipeline with an 8×/4× VAE into `folder`; `options` go to its class."""
    from diffusers import (
        AutoencoderKLWan,
        UniPCMultistepScheduler,
        WanImageToVideoPipeline,
        WanPipeline,
        WanTransformer3DModel,
    )
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    encoder = UMT5EncoderModel(
        UMT5Config(vocab_size=len(vocabulary), d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    vae = AutoencoderKLWan(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.3, -0.2, 0.1, 0.0],
        latents_std=[1.3, 0.7, 1.1, 0.9],
    )
    transformers = {
        name: WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=12 if image_to_video else 4,
            out_channels=4,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=64,
        )
        for name in (["transformer", "transformer_2"] if "boundary_ratio" in options else ["transformer"])
    }
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    cls = WanImageToVideoPipeline if image_to_video else WanPipeline
    pipe = cls(tokenizer=fast, text_encoder=encoder, vae=vae, scheduler=scheduler, **transformers, **options)
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a text-to-video pipeline; not to be changed."""
    return build_pipeline(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def tiny_image_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an image-to-video pipeline; not to be changed."""
    return build_pipeline(tmp_path_factory.mktemp("tiny-i2v") / "model", image_to_video=True)


@pytest.fixture(scope="session")
def tiny_two_stage_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a pipeline with a second transformer for the lower noise levels, as Wan 2.2 A14B."""
    return build_pipeline(tmp_path_factory.mktemp("tiny-a14b") / "model", boundary_ratio=0.8)


@pytest.fixture(scope="session")
def tiny_token_timestep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a pipeline with a timestep for each token, which takes text or image, as Wan 2.2 5B."""
    return build_pipeline(tmp_path_factory.mktemp("tiny-5b") / "model", expand_timesteps=True)


@pytest.fixture
def broken_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the text-to-video pipeline that a test may damage."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def build_adapter(model: Path, file: Path) -> Path:
    """Save an adapter of Based, with LoRA layers, for the pipeline in `model`, as if it had learnt something."""
    from diffusers import WanTransformer3DModel
    from peft import LoraConfig

    from vmonarch import BasedProcessor, apply, save_adapter

    torch.manual_seed(1)
    transformer = WanTransformer3DModel.from_pretrained(model / "transformer")
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_out.0"], init_lora_weights=False))
    apply(transformer, BasedProcessor(layers=["both", "linear"], feature_dim=8, window=(1, 3, 3)))
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if ".processor." in name:
                parameter += 0.3 * torch.randn_like(parameter)
    save_adapter(transformer, file)
    return file


@pytest.fixture(scope="session")
def tiny_adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of Based for the tiny pipeline; not to be changed."""
    return build_adapter(tiny_model, tmp_path_factory.mktemp("tiny-adapter") / "based.safetensors")


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
