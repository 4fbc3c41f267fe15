"""Does a video show what its prompt asks for? Colour, shape and direction of motion are read back from the pixels.

The reader does not know the prompt. It separates saturated pixels from the muted background, groups them by hue,
compares each group with every shape's silhouette, and fits a line to its path. What a video must show is known for the
embedded model's 64 held-out prompts (`vmonarch eval --prompt-set embedded`).

Shapes in comments: F frames, Y height, X width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from vmonarch.finetune.scenes import COLOURS, DIRECTIONS, SHAPES, held_out_prompts, shape_distance

MIN_CHROMA = 0.34
"""Pixels whose largest and smallest channel differ by less are background."""
MIN_AREA = 70
"""Pixels; the smallest object in the training data has about twice this area."""
MIN_TRAVEL = 10.0
"""Pixels over the clip; the slowest object in the training data travels twice as far."""
MIN_OVERLAP = 0.55
"""Intersection over union with the best silhouette below which a group of pixels is no known shape."""


class Seen(NamedTuple):
    """An object in a video or a prompt; shape is None if no known one fits, direction if the object does not move."""

    colour: str
    shape: str | None
    direction: str | None


def _hue(rgb: torch.Tensor) -> torch.Tensor:
    """Hue in turns, [0, 1), of rgb [..., 3]."""
    red, green, blue = rgb.unbind(-1)
    return torch.remainder(torch.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * math.pi), 1.0)


@functools.cache
def _unit_area(shape: str) -> float:
    """Area of a shape of radius 1."""
    grid = (torch.arange(600) + 0.5) / 200 - 1.5
    return 9.0 * float((shape_distance(shape, grid[None, :], grid[:, None], torch.tensor(1.0)) < 0).float().mean())


def _nearest_colours(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Chroma of pixels [F, Y, X, 3] and the index of the nearest colour, -1 for background; both [F, Y, X]."""
    chroma = pixels.amax(-1) - pixels.amin(-1)
    palette = _hue(torch.tensor(list(COLOURS.values()), device=pixels.device))
    saturated = chroma > MIN_CHROMA
    distance = (_hue(pixels[saturated])[:, None] - palette).abs()
    nearest = torch.full_like(chroma, -1, dtype=torch.long)
    nearest[saturated] = torch.minimum(distance, 1 - distance).argmin(-1)
    return chroma, nearest


def read_video(pixels: torch.Tensor) -> list[Seen]:
    """Find the moving shapes of a clip, largest first.

    Args:
        pixels: [F, Y, X, 3], floats in [0, 1], F ≥ 2.

    Raises:
        ValueError: it has another shape.
    """
    if pixels.ndim != 4 or pixels.shape[-1] != 3 or len(pixels) < 2:
        raise ValueError(f"video must be [frames, height, width, 3], at least 2 frames, got {tuple(pixels.shape)}")
    frames, height, width = pixels.shape[:3]
    device = pixels.device
    chroma, nearest = _nearest_colours(pixels)
    ys = torch.arange(height, device=device)[:, None] + 0.5
    xs = torch.arange(width, device=device)[None, :] + 0.5
    found: list[tuple[float, Seen]] = []
    for index, colour in enumerate(COLOURS):
        mask, least, strong = nearest == index, float(MIN_AREA), MIN_CHROMA
        for _ in range(2):
            mask = mask & (chroma > strong)
            areas = mask.sum((1, 2)).float()  # [F]
            present = areas >= least
            if present.float().mean() < 0.8:
                break
            # A clean edge lies half-way between the object's chroma and that of the background.
            some = chroma[mask][:: max(1, int(mask.sum()) // 20_000)]
            least, strong = MIN_AREA / 2, max(MIN_CHROMA, 0.5 * float(torch.quantile(some, 0.8)))
        else:
            weights = mask.float() / areas.clamp(min=1)[:, None, None]
            centres = torch.stack(((weights * xs).sum((1, 2)), (weights * ys).sum((1, 2))), -1)[present]
            # Displacement over the whole clip, by the least-squares line through the centres [n, 2].
            numbers = torch.nonzero(present)[:, 0].float()
            deviation = numbers - numbers.mean()
            slope = (deviation[:, None] * (centres - centres.mean(0))).sum(0) / deviation.square().sum().clamp(min=1e-6)
            right, down = (slope * (frames - 1)).tolist()
            towards = lambda name, right=right, down=down: right * DIRECTIONS[name][0] + down * DIRECTIONS[name][1]
            overlaps = _overlaps(mask[present], centres, areas[present], xs, ys)
            best = int(overlaps.argmax())
            shape = SHAPES[best] if overlaps[best] >= MIN_OVERLAP else None
            direction = max(DIRECTIONS, key=towards) if math.hypot(right, down) >= MIN_TRAVEL else None
            found.append((float(areas.median()), Seen(colour, shape, direction)))
    return [seen for _, seen in sorted(found, key=lambda entry: -entry[0])]


def _overlaps(
    mask: torch.Tensor, centres: torch.Tensor, areas: torch.Tensor, xs: torch.Tensor, ys: torch.Tensor
) -> torch.Tensor:
    """Intersection over union with each shape's silhouette of equal centre and area, mean of nine frames: [6]."""
    picked = torch.linspace(0, len(mask) - 1, 9, device=mask.device).round().long()
    mask, centres, areas = mask[picked], centres[picked], areas[picked]
    x, y = xs - centres[:, 0, None, None], ys - centres[:, 1, None, None]  # [9, 1, X], [9, Y, 1]
    results = []
    for shape in SHAPES:
        silhouette = shape_distance(shape, x, y, (areas / _unit_area(shape)).sqrt()[:, None, None]) < 0
        union = (silhouette | mask).sum((1, 2)).clamp(min=1)
        results.append(((silhouette & mask).sum((1, 2)) / union).mean())
    return torch.stack(results)


def score(seen: Sequence[Seen], expected: Sequence[Seen]) -> float:
    """The prompt score: the share of three properties, colour, shape and direction, that are right for all objects.

    Colours are right if the objects have exactly the requested ones and none is missing or left over. Shape and
    direction are compared object by object. Objects are paired by colour first and the remaining ones by area, so that
    a wrong colour alone does not count as a wrong shape.
    """
    left, pairs = list(seen), []
    for want in expected:
        found = next((one for one in left if one.colour == want.colour), None)
        pairs.append((want, found))
        left = [one for one in left if one is not found]
    colour = all(found for _, found in pairs) and len(seen) == len(expected)
    pairs = [(want, found or (left.pop(0) if left else None)) for want, found in pairs]
    matches = lambda name: all(getattr(want, name) == getattr(found, name, None) for want, found in pairs)
    return (colour + matches("shape") + matches("direction")) / 3


@functools.cache
def expected_objects() -> dict[str, tuple[Seen, ...]]:
    """The objects that a video must show, for each held-out prompt of the embedded model."""
    scenes = held_out_prompts().items()
    return {prompt: tuple(Seen(x.colour, x.shape, x.direction) for x in scene.objects) for prompt, scene in scenes}


def count_objects(pixels: torch.Tensor) -> list[dict[str, int]]:
    """Number of objects by colour in each frame of a clip [F, Y, X, 3]; an object is a large enough connected area."""
    from scipy.ndimage import label

    chroma, nearest = (x.cpu() for x in _nearest_colours(pixels))
    counts: list[dict[str, int]] = [{} for _ in pixels]
    for index, colour in enumerate(COLOURS):
        mask = nearest == index
        for frame in torch.nonzero(mask.sum((1, 2)) >= MIN_AREA / 2)[:, 0].tolist():
            # A clean edge lies half-way between the chroma of an object and of the background, as in `read_video`.
            strong = 0.5 * float(torch.quantile(chroma[frame][mask[frame]], 0.8))
            parts, _ = label((mask[frame] & (chroma[frame] > strong)).numpy())
            areas = torch.from_numpy(parts).flatten().bincount()[1:]
            if number := int((areas >= MIN_AREA / 2).sum()):
                counts[frame][colour] = number
    return counts


def permanence(frames: torch.Tensor, prompt: str) -> float | None:
    """The share of frames [F, 3, Y, X] that show each object of the prompt once, in its colour, and no other object.

    It falls when an object vanishes, doubles, changes its colour or appears from nowhere. It is None for prompts that
    are not held-out ones.
    """
    if prompt not in expected_objects():
        return None
    expected = {one.colour: 1 for one in expected_objects()[prompt]}
    counts = count_objects(frames.float().permute(0, 2, 3, 1))
    return sum(count == expected for count in counts) / len(counts)


def prompt_score(frames: torch.Tensor, prompt: str) -> float | None:
    """`score` of a video [F, 3, Y, X] from 0 to 1; None for prompts that are not held-out ones, or a single frame."""
    if len(frames) < 2 or prompt not in expected_objects():
        return None
    return score(read_video(frames.float().permute(0, 2, 3, 1)), expected_objects()[prompt])
