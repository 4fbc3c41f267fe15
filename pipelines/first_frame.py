"""The first frame of image-to-video models, from a picture file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from vmonarch.configs import InputError

if TYPE_CHECKING:
    from PIL import Image


def open_image(path: str, height: int, width: int) -> tuple[Image.Image, str]:
    """The first frame that a picture file gives, RGB of this size, and in words what of the picture it does not show.

    The picture stands as its EXIF tag says, has its colour profile converted to sRGB, its 16 bits scaled to 8 and
    transparent pixels laid over black, and is cropped to the frame's shape, at its centre, and scaled. Clips for
    training are cropped alike.

    Raises:
        InputError: it or its colour profile cannot be read, or it has 32 bits a channel, whose white nobody knows.
    """
    from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            picture, form = ImageOps.exif_transpose(image), image.format
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError("image", f"must be a picture file, {path!r} cannot be read: {error}") from error
    # Pillow holds 16 bits in 32 for some formats, which have no more.
    if picture.mode.startswith("I;16") or (picture.mode == "I" and form in ("PNG", "PPM")):
        import numpy as np

        levels, transparent = np.asarray(picture), picture.info.get("transparency")
        picture = Image.fromarray((levels / 257).round().astype(np.uint8))
        if transparent is not None:
            picture.putalpha(Image.fromarray(((levels != transparent) * 255).astype(np.uint8)))
    elif picture.mode in ("I", "F"):
        raise InputError("image", f"must have 8 or 16 bits a channel, {path!r} has 32")
    if (profile := picture.info.get("icc_profile")) and picture.mode in ("RGB", "RGBA", "CMYK"):
        try:
            srgb, mode = ImageCms.createProfile("sRGB"), "RGBA" if picture.mode == "RGBA" else "RGB"
            converted = ImageCms.profileToProfile(picture, io.BytesIO(profile), srgb, outputMode=mode)
        except (ImageCms.PyCMSError, OSError) as error:
            raise InputError("image", f"has a colour profile that cannot be used: {error}; save it as sRGB") from error
        assert converted is not None
        picture = converted
    changes = []
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema() != (255, 255):
            changes.append("transparent pixels are laid over black")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, (0, 0, 0, 255)), picture)
    size = picture.size
    kept = (min(size[0], round(size[1] * width / height)), min(size[1], round(size[0] * height / width)))
    if kept != size:
        changes.append(f"{size[0]}×{size[1]} is cropped to {kept[0]}×{kept[1]}, the shape of {width}×{height}")
    # As diffusers scales.
    frame = ImageOps.fit(picture.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
    return frame, "; ".join(changes)
