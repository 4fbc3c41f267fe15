"""One training clip as a row of FastVideo's parquet, and back.

A tensor is three columns: `NAME_bytes`, `NAME_shape`, `NAME_dtype`. Latents are the VAE's means as they are,
[C, T, H, W]; training normalises them with the VAE's statistics. (`first_frame_latent` is stored normalised.) Text is
[L, D] without padding. Read are the columns of the text-to-video schema and, where they are, those that image-to-video
adds.

Source: https://github.com/hao-ai-lab/FastVideo (`pyarrow_schema_t2v`, `pyarrow_schema_i2v`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

# Tensors that every row has, and those of image-to-video.
TENSORS = ("vae_latent", "text_embedding")
EXTRA_TENSORS = ("clip_feature", "first_frame_latent", "pil_image")
_DIMENSIONS = {"vae_latent": 4, "text_embedding": 2, "clip_feature": 2, "first_frame_latent": 4, "pil_image": 3}
# Names of dtypes as numpy and torch write them. FastVideo stores bfloat16 tensors as float32.
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "uint8": torch.uint8,
}
# Tokens of text that a transformer is trained with: shorter text is padded with zeros.
TEXT_LENGTH = 512
# The other columns.
PLAIN = {
    **dict.fromkeys(("id", "file_name", "caption", "media_type"), pa.string()),
    **dict.fromkeys(("width", "height", "num_frames"), pa.int64()),
    **dict.fromkeys(("duration_sec", "fps"), pa.float64()),
}
PARTS = {"bytes": pa.binary(), "shape": pa.list_(pa.int64()), "dtype": pa.string()}


class BadRow(ValueError):
    """A row that cannot be trained on; the message says why."""


@dataclass(frozen=True)
class Sample:
    """A clip.

    Args:
        id: unique in its data set.
        latents: [C, T, H, W], raw means of the VAE.
        text: [L, D], without padding; L = 0 for no caption.
        caption: what `text` encodes.
        width, height: of the video, in pixels; fps, duration: of it, in frames per second and seconds.
        extras: by the names in EXTRA_TENSORS.
    """

    id: str
    latents: torch.Tensor
    text: torch.Tensor
    caption: str = ""
    file_name: str = ""
    media_type: str = "video"
    width: int = 0
    height: int = 0
    fps: float = 0.0
    duration: float = 0.0
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)


def tensor_columns(names: Iterable[str]) -> list[str]:
    """Columns of the tensors with these names."""
    return [f"{name}_{part}" for name in names for part in PARTS]


def row_schema(extras: tuple[str, ...] = ()) -> pa.Schema:
    """Every column and its type; that of `id` is the first."""
    kinds = {column: PARTS[column.rpartition("_")[2]] for column in tensor_columns((*TENSORS, *extras))}
    return pa.schema({"id": PLAIN["id"], **kinds, **PLAIN})


def encode_row(sample: Sample) -> dict[str, Any]:
    """The columns of a clip."""
    row: dict[str, Any] = {
        "id": sample.id,
        "file_name": sample.file_name,
        "caption": sample.caption,
        "media_type": sample.media_type,
        "width": sample.width,
        "height": sample.height,
        "num_frames": sample.latents.shape[1],
        "duration_sec": sample.duration,
        "fps": sample.fps,
    }
    for name, tensor in {"vae_latent": sample.latents, "text_embedding": sample.text, **sample.extras}.items():
        row |= _encode_tensor(name, tensor)
    return row


def _encode_tensor(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    names = {dtype: text for text, dtype in DTYPES.items()}
    if tensor.dtype not in names:
        raise ValueError(f"{name} must have one of the dtypes {', '.join(DTYPES)}, got {tensor.dtype}")
    flat = tensor.detach().cpu().contiguous().flatten()
    # numpy knows no bfloat16.
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {f"{name}_bytes": data, f"{name}_shape": list(tensor.shape), f"{name}_dtype": names[tensor.dtype]}


def decode_row(row: Mapping[str, Any]) -> Sample:
    """The clip in a row.

    Raises:
        BadRow: a column is missing or empty, bytes do not fit shape and dtype, a value is not finite, a tensor has the
            wrong number of dimensions.
    """
    for name in ("id", "caption"):
        if not isinstance(row.get(name), str):
            raise BadRow(f"column {name} must be a string, got {type(row.get(name)).__name__}")
    if not row["id"]:
        raise BadRow("column id is empty")
    latents, text = (_decode_tensor(row, name) for name in TENSORS)
    if not latents.numel():
        raise BadRow(f"vae_latent has no element; its shape is {list(latents.shape)}")
    present = [name for name in EXTRA_TENSORS if row.get(f"{name}_bytes") is not None]
    return Sample(
        id=row["id"],
        latents=latents,
        text=text,
        caption=row["caption"],
        file_name=str(row.get("file_name") or ""),
        media_type=str(row.get("media_type") or "video"),
        width=int(row.get("width") or 0),
        height=int(row.get("height") or 0),
        fps=float(row.get("fps") or 0.0),
        duration=float(row.get("duration_sec") or 0.0),
        extras={name: _decode_tensor(row, name) for name in present},
    )


def _decode_tensor(row: Mapping[str, Any], name: str) -> torch.Tensor:
    data, shape, dtype_name = (row.get(f"{name}_{part}") for part in ("bytes", "shape", "dtype"))
    if not isinstance(data, bytes | bytearray | memoryview):
        raise BadRow(f"column {name}_bytes must be bytes, got {type(data).__name__}")
    dtype = DTYPES.get(str(dtype_name).removeprefix("torch."))
    if dtype is None:
        raise BadRow(f"{name}_dtype must be one of {', '.join(DTYPES)}, got {dtype_name!r}")
    try:
        sizes = [int(size) for size in shape]  # type: ignore[union-attr]
    except (TypeError, ValueError) as error:
        raise BadRow(f"{name}_shape must be a list of integers, got {shape!r}") from error
    if len(sizes) != _DIMENSIONS[name] or min(sizes) < 0:
        raise BadRow(f"{name}_shape must have {_DIMENSIONS[name]} sizes, got {sizes}")
    wanted = math.prod(sizes) * dtype.itemsize
    if len(data) != wanted:
        raise BadRow(f"{name}_bytes has {len(data)} bytes, but {sizes} of {dtype_name} take {wanted}")
    if not data:
        return torch.empty(sizes, dtype=dtype)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(sizes)
    if dtype.is_floating_point and not tensor.isfinite().all():
        raise BadRow(f"{name} has values that are not finite")
    return tensor
