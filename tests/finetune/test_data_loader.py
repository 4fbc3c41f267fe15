"""Shards and batches: every row once, and broken data is named and never hangs."""

import random
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from vmonarch.finetune.data import parquet as parquet_module
from vmonarch.finetune.data.loader import LatentLoader
from vmonarch.finetune.data.parquet import (
    TEXT_LENGTH,
    DataError,
    ParquetFolder,
    Sample,
    decode_row,
    encode_row,
    row_schema,
)
from vmonarch.finetune.data.parquet import write_shard as write

C, T, H, W, DIM = 3, 2, 2, 4, 5
MEAN, STD = torch.tensor([0.5, -1.0, 2.0]), torch.tensor([2.0, 0.25, 1.5])
CUT = {"vae_latent_bytes": b"cut"}


def sample(number, **changes):
    generator = torch.Generator().manual_seed(number)
    values = dict(
        id=f"clip-{number}",
        latents=torch.randn(C, T, H, W, generator=generator),
        text=torch.randn(1 + number % 4, DIM, generator=generator),
    )
    return Sample(**{**values, **changes})


def fill(folder, rows, files=2):
    """Shards of clips 0 to rows - 1 in order."""
    for file in range(files):
        numbers = range(rows * file // files, rows * (file + 1) // files)
        write(folder / f"{file}.parquet", map(sample, numbers))
    return ParquetFolder(folder)


def write_plain(path, *rows):
    """A file as `pyarrow` alone makes it."""
    pq.write_table(pa.Table.from_pylist(list(rows), schema=row_schema()), path)
    return ParquetFolder(path.parent)


def make(folder, **changes):
    values = dict(batch_size=2, seed=7, mean=MEAN, std=STD, text_dim=DIM)
    return LatentLoader(folder, **{**values, **changes})


def epoch_ids(loader):
    return [name for batch in islice(loader.batches(), loader.batches_per_epoch) for name in batch.ids]


# Shards


BROKEN = {
    "cut": (CUT, "vae_latent is no tensor of dtype float32"),
    "other-rank": ({"vae_latent_shape": [6, 8]}, "vae_latent must have 4 dimensions"),
    "half-an-extra": ({"clip_feature_bytes": b"1234"}, "clip_feature is no tensor"),
    "nan": (encode_row(sample(0, latents=torch.full((1, 1, 1, 1), torch.nan))), "4 dimensions and finite values"),
}


def test_a_broken_row_says_why():
    for changes, message in BROKEN.values():
        with pytest.raises(DataError, match=message):
            decode_row({**encode_row(sample(0)), **changes})


def test_data_that_cannot_be_used_is_named(tmp_path):
    refused = lambda message: pytest.raises(DataError, match=message)
    with refused(f"no .*parquet file in {tmp_path}"):
        ParquetFolder(tmp_path)
    path = tmp_path / "0.parquet"
    write(path, [])
    with refused("no rows in .* 1 parquet"):
        ParquetFolder(tmp_path)
    write_plain(path, encode_row(sample(0)))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with refused("0.parquet is not a parquet file, or its end is missing"):
        ParquetFolder(tmp_path)
    path.write_bytes(whole)
    pq.write_table(pq.read_table(path).drop_columns(["vae_latent_shape", "id"]), path)
    with refused(r"0.parquet lacks the column\(s\) id, vae_latent_shape"):
        ParquetFolder(tmp_path)
    # Clips that no batch can hold together.
    for changes in ({"latents": torch.zeros(C, T, W, H)}, {"extras": {"clip_feature": torch.ones(2, 3)}}):
        path.unlink()
        write(path, [sample(0)]), write(tmp_path / "1.parquet", [sample(1, **changes)])
        with refused("must have tensors of one shape, got .*clip-0: vae_latent .3, 2, 2, 4.(;|$)"):
            epoch_ids(make(ParquetFolder(tmp_path)))
        (tmp_path / "1.parquet").unlink()


def test_what_ends_a_run_is_named(tmp_path):
    folder = fill(tmp_path, 6)
    (tmp_path / "1.parquet").rename(tmp_path / "kept")
    with pytest.raises(FileNotFoundError, match="1.parquet"):
        epoch_ids(make(folder))
    write(tmp_path / "1.parquet", [sample(3, text=torch.ones(2, DIM + 1))])
    with pytest.raises(DataError, match="text_dim is 5, but row 0 of row group 0 of .*1.parquet has text of 6"):
        epoch_ids(make(ParquetFolder(tmp_path)))
    (tmp_path / "1.parquet").unlink()
    write(tmp_path / "1.parquet", [sample(3, latents=torch.ones(C + 1, T, H, W))])
    with pytest.raises(DataError, match="have 3 channels, but row 0 of row group 0 of .*1.parquet has latents of"):
        epoch_ids(make(ParquetFolder(tmp_path)))
    folder = write_plain(tmp_path / "1.parquet", encode_row(sample(3)), {**encode_row(sample(4)), **CUT})
    with pytest.raises(DataError, match="row 1 of row group 0 of .*1.parquet cannot be used: vae_latent is no tensor"):
        epoch_ids(make(folder))


def test_a_flipped_byte_makes_its_row_unusable(tmp_path):
    """Without our checksums a changed number in a page is a number."""
    folder, path = fill(tmp_path, 9, files=1), tmp_path / "0.parquet"
    group = pq.read_metadata(path).row_group(3)
    columns = [group.column(number) for number in range(group.num_columns)]
    latents = next(column for column in columns if column.path_in_schema == "vae_latent_bytes")
    content = bytearray(path.read_bytes())
    content[latents.data_page_offset + latents.total_compressed_size // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"^row 0 of row group 3 of {path} cannot be used: "):
        folder.read(3)
    assert [folder.read(index).id for index in (2, 4)] == ["clip-2", "clip-4"]


# Batches


@pytest.mark.parametrize("world", [1, 2])
def test_every_row_comes_once_in_an_epoch_and_epochs_differ(tmp_path, world):
    folder = fill(tmp_path, 13)
    loaders = [make(folder, rank=rank, world_size=world) for rank in range(world)]
    epochs, ranks = [], [loader.batches() for loader in loaders]
    for _ in range(2):
        batches = zip(*(islice(rank, loaders[0].batches_per_epoch) for rank in ranks), strict=True)
        epochs.append([name for side_by_side in batches for batch in side_by_side for name in batch.ids])
        # The last batch repeats the first rows.
        assert sorted(epochs[-1][:13]) == sorted(f"clip-{n}" for n in range(13))
        assert epochs[-1][13:] == epochs[-1][: {1: 1, 2: 3}[world]]
    assert epochs[0] != epochs[1]


def test_caption_dropout_has_its_share_and_follows_the_slot_alone(tmp_path):
    folder = fill(tmp_path, 300)
    both = list(islice(make(folder, batch_size=4, caption_dropout=0.2).batches(), 150))
    flags = lambda batches: [not text.any() for batch in batches for text in batch.text]
    whole, dropped = both[:75], flags(both[:75])
    assert dropped != flags(both[75:])
    assert abs(sum(dropped) / 300 - 0.2) < 4 * (0.2 * 0.8 / 300) ** 0.5
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    state = lambda: (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())
    before = state()
    ranks = [make(folder, rank=rank, world_size=2, caption_dropout=0.2).batches() for rank in range(2)]
    for wanted, first, second in zip(whole, *ranks, strict=False):
        assert torch.equal(wanted.text, torch.cat([first.text, second.text]))
    assert state() == before
    first = lambda count, **changes: flags(islice(make(folder, **changes).batches(), count))
    assert first(75, batch_size=4, seed=8, caption_dropout=0.2) != dropped
    assert not any(first(20)) and all(first(20, caption_dropout=1.0))


def test_a_dropped_caption_is_the_encoding_that_the_folder_brings(tmp_path):
    without = fill(tmp_path, 12)
    empty = torch.randn(TEXT_LENGTH + 3, DIM).half()
    save_file({"text_embedding": empty}, tmp_path / parquet_module.EMPTY_CAPTION)
    folder = ParquetFolder(tmp_path)
    assert torch.equal(folder.empty_caption, empty.float())
    batches = list(islice(make(folder, caption_dropout=0.5).batches(), 6))
    kept = []
    for found, plain in zip(batches, make(without).batches(), strict=False):
        for text, own in zip(found.text, plain.text, strict=True):
            kept.append(torch.equal(text, own))
            assert kept[-1] or torch.equal(text, empty.float()[:TEXT_LENGTH])
    assert set(kept) == {True, False}
    assert folder.fingerprint() != without.fingerprint()
    with pytest.raises(DataError, match="text_dim is 6, but .*empty-caption.safetensors has text of 5"):
        make(folder, text_dim=6)
