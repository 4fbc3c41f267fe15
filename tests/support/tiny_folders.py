"""Tiny random pipelines with tokenizers and text encoders, in folders as the hub's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import tiny_wan
import torch
from tiny_families import FAMILIES
from tiny_pipelines import pipeline
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

_WORDS = "a red green blue circle square moving right left"
_LAYER = {"vocab_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
# As many words before the prompt as the pipeline cuts off, with those of the system's message.
_CHAT = "{% for m in messages %}{{ m.content }} " + "filler " * 25 + "{% endfor %}"


def _tokenizer(length: int = 1024, **options: Any) -> PreTrainedTokenizerFast:
    return tiny_wan.tokenizer(_WORDS, model_max_length=length, **options)


def _t5(dim: int, words: int = 16) -> T5EncoderModel:
    return T5EncoderModel(T5Config(vocab_size=words, d_model=dim, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def _hunyuan_text() -> dict[str, Any]:
    clip = CLIPTextConfig(**_LAYER, hidden_size=8, max_position_embeddings=77, eos_token_id=1)
    return {
        "tokenizer": _tokenizer(),
        "text_encoder": LlamaModel(LlamaConfig(**_LAYER, hidden_size=16)),
        "tokenizer_2": _tokenizer(77),
        "text_encoder_2": CLIPTextModel(clip),
    }


def _hunyuan15_text() -> dict[str, Any]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    config = Qwen2_5_VLTextConfig(**_LAYER, hidden_size=16, num_key_value_heads=2, rope_parameters=rope)
    return {
        "tokenizer": _tokenizer(chat_template=_CHAT),
        "text_encoder": Qwen2_5_VLTextModel(config),
        "tokenizer_2": ByT5Tokenizer(),
        "text_encoder_2": _t5(8, 384),
    }


def _one_encoder(dim: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"tokenizer": _tokenizer(), "text_encoder": _t5(dim)}


def _cogvideox15() -> dict[str, Any]:
    """Tokens of two latent frames, and rotary tables of a largest size."""
    model = FAMILIES["cogvideox"].make(patch_size_t=2, sample_height=8, sample_width=12)
    return _one_encoder(8)() | {"transformer": model}


# Name of a pipeline in `tiny_pipelines` or `tiny_wan`, parts to put in, grid of a video of `size`.
FOLDERS: dict[str, tuple[str, Callable[[], dict[str, Any]], tuple[int, int, int]]] = {
    "t2v": ("t2v", dict, (3, 2, 3)),
    "hunyuan": ("hunyuan", _hunyuan_text, (3, 2, 3)),
    "hunyuan15": ("hunyuan15", _hunyuan15_text, (3, 2, 3)),
    "ltx": ("ltx", _one_encoder(16), (3, 2, 3)),
    "cogvideox": ("cogvideox", _one_encoder(8), (3, 2, 3)),
    "cogvideox15": ("cogvideox", _cogvideox15, (2, 2, 3)),
}


def size(name: str) -> dict[str, int]:
    """num_frames, height and width of a small video."""
    frames, height, width = (17, 64, 96) if name == "ltx" else (9, 32, 48)
    return {"num_frames": frames, "height": height, "width": width}


def save(name: str, folder: Path) -> None:
    """Write one of `FOLDERS`, or one of `tiny_wan.KINDS`."""
    if name in tiny_wan.KINDS:
        tiny_wan.pipeline(name).save_pretrained(folder)
        return
    stock, parts, _ = FOLDERS[name]
    pipe, _ = pipeline(stock)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = parts()
    type(pipe)(**pipe.components | found).save_pretrained(folder)


def stock(folder: Path) -> Any:
    """The pipeline in a folder, without any of ours."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe
