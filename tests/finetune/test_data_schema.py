"""Rows of FastVideo's parquet: what goes in comes out, and what is broken is named."""

import pytest
import torch

from vmonarch.finetune.data.schema import DTYPES, BadRow, Sample, decode_row, encode_row, row_schema


def sample(**changes):
    values = dict(
        id="clip-1",
        latents=torch.randn(16, 3, 4, 5),
        text=torch.randn(7, 12),
        caption="a red circle",
        width=40,
        height=32,
        fps=16.0,
        duration=0.6,
    )
    return Sample(**{**values, **changes})


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_a_row_keeps_every_bit(name):
    given = sample(latents=torch.randn(16, 3, 4, 5).to(DTYPES[name]), extras={"clip_feature": torch.randn(5, 6).half()})
    row = encode_row(given)
    assert set(row) == set(row_schema(("clip_feature",)).names)
    assert row["vae_latent_dtype"] == name and row["num_frames"] == 3
    found = decode_row(row)
    assert found.latents.dtype == DTYPES[name] and torch.equal(found.latents, given.latents)
    assert torch.equal(found.text, given.text) and torch.equal(
        found.extras["clip_feature"], given.extras["clip_feature"]
    )
    assert (found.id, found.caption, found.width, found.height, found.fps, found.duration) == (
        "clip-1", "a red circle", 40, 32, 16.0, 0.6
    )  # fmt: skip


def test_no_caption_is_a_text_of_no_token():
    assert decode_row(encode_row(sample(text=torch.zeros(0, 12), caption=""))).text.shape == (0, 12)


BROKEN = {
    "no-id": ({"id": ""}, "id is empty"),
    "no-caption": ({"caption": None}, "caption must be a string"),
    "no-bytes": ({"vae_latent_bytes": None}, "vae_latent_bytes must be bytes"),
    "cut": ({"vae_latent_bytes": b"12"}, "has 2 bytes"),
    "other-dtype": ({"vae_latent_dtype": "int7"}, "vae_latent_dtype must be one of"),
    "other-rank": ({"vae_latent_shape": [16, 60]}, "must have 4 sizes"),
    "no-shape": ({"text_embedding_shape": None}, "must be a list of integers"),
    "empty": ({"vae_latent_shape": [16, 0, 4, 5], "vae_latent_bytes": b""}, "has no element"),
    "nan": (encode_row(sample(latents=torch.full((1, 1, 1, 1), torch.nan))), "not finite"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_row_says_why(name):
    changes, message = BROKEN[name]
    with pytest.raises(BadRow, match=message):
        decode_row({**encode_row(sample()), **changes})


def test_a_dtype_that_no_row_can_hold_is_named():
    with pytest.raises(ValueError, match="text_embedding must have one of the dtypes"):
        encode_row(sample(text=torch.zeros(1, 1, dtype=torch.int64)))
