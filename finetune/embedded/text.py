"""The text side of the embedded model: a byte-level BPE tokenizer learnt from captions, and a small UMT5 encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from vmonarch.finetune.scenes import OBJECT_TABLES, SCENE_TABLES, SceneBatch

TEXT_LENGTH = 512
"""Rows of prompt embedding the stock Wan pipeline gives the transformer; rows past the prompt's tokens are zero."""
TRAIN_TOKENS = 55
VOCABULARY = 1024
TEXT_DIM = 128
TEXT_CONFIG: dict[str, Any] = {
    "d_model": TEXT_DIM,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 64,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "is_encoder_decoder": False,
    "use_cache": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def train_tokenizer(captions: Iterable[str], vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Learn byte-level BPE from lower-cased captions; unknown words fall back to shorter pieces, at worst to bytes.

    Token 0 pads, token 1 ends every text, as in T5.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(captions, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        model_max_length=TEXT_LENGTH,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, captions: Sequence[str], length: int = TRAIN_TOKENS) -> torch.Tensor:
    """Token numbers [len(captions), length], int16, padded with 0 and cut to `length`."""
    backend = tokenizer.backend_tokenizer
    # An earlier call of the tokenizer may have left its padding behind.
    backend.no_padding()
    backend.no_truncation()
    result = torch.zeros(len(captions), length, dtype=torch.int16)
    for row, encoding in zip(result, backend.encode_batch_fast(list(captions)), strict=True):
        ids = encoding.ids if len(encoding.ids) <= length else [*encoding.ids[: length - 1], 1]
        row[: len(ids)] = torch.tensor(ids, dtype=torch.int16)
    return result


def build_text_encoder(vocabulary: int = VOCABULARY, **overrides: Any) -> UMT5EncoderModel:
    """A fresh UMT5 encoder of the embedded model's size."""
    return UMT5EncoderModel(UMT5Config(vocab_size=vocabulary, **{**TEXT_CONFIG, **overrides}))


def encode_text(
    encoder: Callable[..., Any], ids: torch.Tensor, padding: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode token numbers [B, L] as the stock pipeline does.

    Returns:
        embeddings, zero past each text's tokens: [B, 512, D], or [B, L + padding, D] where `padding` is given; and the
        mean over each text's tokens [B, D].
    """
    ids = ids.long()
    mask = ids != 0
    hidden = encoder(ids, mask.long()).last_hidden_state * mask[..., None]
    pooled = hidden.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    return F.pad(hidden, (0, 0, 0, TEXT_LENGTH - ids.shape[1] if padding is None else padding)), pooled


class AttributeHeads(nn.Module):
    """Training aid, not shipped: reads every attribute of the scene back from the pooled text."""

    def __init__(self, dim: int = TEXT_DIM) -> None:
        super().__init__()
        self.sizes = [len(table) + 1 for table in OBJECT_TABLES.values()] * 2 + [len(t) for t in SCENE_TABLES.values()]
        self.hidden = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(2 * dim, sum(self.sizes))

    def forward(self, pooled: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy per clip [B]; pooled [B, D], targets [B, A]."""
        logits = self.out(F.gelu(self.hidden(pooled))).float().split(self.sizes, dim=-1)
        pairs = zip(logits, targets.T, strict=True)
        return torch.stack([F.cross_entropy(logit, target, reduction="none") for logit, target in pairs]).mean(0)


def attribute_targets(scenes: SceneBatch) -> torch.Tensor:
    """Targets of `AttributeHeads`: [B, 13]; an absent second object has a class of its own."""
    columns = []
    for slot in range(2):
        for name, table in OBJECT_TABLES.items():
            columns.append(torch.where(scenes.count > slot, getattr(scenes, name)[:, slot], len(table)))
    return torch.stack([*columns, *(getattr(scenes, name) for name in SCENE_TABLES)], 1)
