"""Does a video show what its prompt asks for? Colour, shape and direction of motion are read back from the pixels.

The reader knows nothing of the prompt. It separates saturated pixels from the muted background, groups them by hue,
compares each group with every shape's silhouette, and fits a line to its path. `python -m vmonarch.eval.prompt_score`
generates the 64 held-out prompts with the embedded model and scores them, with full attention and with VMonarch.

Shapes in comments: F frames, Y height, X width.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import file_name, write_json
from vmonarch.finetune.embedded.data import (
    COLOUR_NAMES,
    COLOUR_WORDS,
    COLOURS,
    DIRECTION_NAMES,
    DIRECTION_WORDS,
    DIRECTIONS,
    SHAPE_WORDS,
    SHAPES,
    SOLE_VERBS,
    HeldOutPrompt,
    SceneAttributes,
    held_out_prompts,
    render,
    sample_scenes,
    shape_distance,
)
from vmonarch.pipelines.loading import read_pipeline
from vmonarch.pipelines.model_folder import ModelError, find_model

MIN_CHROMA = 0.34
"""Pixels whose largest and smallest channel differ by less are background."""
MIN_AREA = 70
"""Pixels; the smallest object of the training data has about twice as many."""
MIN_TRAVEL = 10.0
"""Pixels over the clip; the slowest object of the training data travels twice as far."""
MIN_OVERLAP = 0.55
"""Intersection over union with the best silhouette below which a group of pixels is no known shape."""


@dataclass(frozen=True)
class ObjectReading:
    """One object found in a video.

    `shape` and `direction` are None where no known shape fits or nothing moves; `travel` is (right, down) in pixels
    over the clip, `area` the median number of pixels, `overlap` the intersection over union with the best silhouette.
    """

    colour: str
    shape: str | None
    direction: str | None
    travel: tuple[float, float]
    area: float
    overlap: float


@dataclass(frozen=True)
class ExpectedObject:
    """What a prompt says about one object; None where it says nothing."""

    colour: str | None
    shape: str | None
    direction: str | None


@dataclass(frozen=True)
class PromptMatch:
    """Whether colours, shapes and directions all match the prompt (every object's)."""

    colour: bool
    shape: bool
    direction: bool

    @property
    def all(self) -> bool:
        """In tables "all three"."""
        return self.colour and self.shape and self.direction

    @property
    def score(self) -> float:
        """The prompt score: the share of the three that match."""
        return (self.colour + self.shape + self.direction) / 3


def _hue(rgb: torch.Tensor) -> torch.Tensor:
    """Hue in turns, [0, 1), of rgb [..., 3]."""
    red, green, blue = rgb.unbind(-1)
    return torch.remainder(torch.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) / (2 * math.pi), 1.0)


def _as_video(video: torch.Tensor | np.ndarray) -> torch.Tensor:
    tensor = torch.as_tensor(video)
    if tensor.ndim != 4 or tensor.shape[-1] != 3:
        raise ValueError(f"video must be [frames, height, width, 3], got {tuple(tensor.shape)}")
    if tensor.shape[0] < 2:
        raise ValueError(f"video must have at least 2 frames, got {tensor.shape[0]}")
    tensor = tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()
    if not torch.isfinite(tensor).all() or tensor.min() < -1e-3 or tensor.max() > 1 + 1e-3:
        raise ValueError("video must be uint8, or finite floats in [0, 1]")
    return tensor


@functools.cache
def _unit_area(shape: str) -> float:
    """Area of a shape of radius 1."""
    grid = (torch.arange(600) + 0.5) / 200 - 1.5
    return 9.0 * float((shape_distance(shape, grid[None, :], grid[:, None], torch.tensor(1.0)) < 0).float().mean())


def read_video(video: torch.Tensor | np.ndarray) -> list[ObjectReading]:
    """Find the moving shapes of a clip, largest first.

    Args:
        video: [F, Y, X, 3], uint8 or floats in [0, 1], F ≥ 2.

    Raises:
        ValueError: `video` has another shape, is not finite, or is out of range.
    """
    pixels = _as_video(video)
    frames, height, width = pixels.shape[:3]
    device = pixels.device
    chroma = pixels.amax(-1) - pixels.amin(-1)  # [F, Y, X]
    palette = _hue(torch.tensor(list(COLOURS.values()), device=device))
    saturated = chroma > MIN_CHROMA
    distance = (_hue(pixels[saturated])[:, None] - palette).abs()
    nearest = torch.full_like(chroma, -1, dtype=torch.long)
    nearest[saturated] = torch.minimum(distance, 1 - distance).argmin(-1)
    ys = torch.arange(height, device=device)[:, None] + 0.5
    xs = torch.arange(width, device=device)[None, :] + 0.5
    readings = []
    for index, colour in enumerate(COLOUR_NAMES):
        mask = nearest == index
        areas = mask.sum((1, 2)).float()  # [F]
        present = areas >= MIN_AREA
        if present.float().mean() < 0.8:
            continue
        # A clean edge lies half-way between the object's chroma and that of the background.
        strong = torch.quantile(chroma[mask][:: max(1, int(mask.sum()) // 20_000)], 0.8)
        mask = mask & (chroma > max(MIN_CHROMA, 0.5 * float(strong)))
        areas = mask.sum((1, 2)).float()
        present = areas >= MIN_AREA / 2
        if present.float().mean() < 0.8:
            continue
        weights = mask.float() / areas.clamp(min=1)[:, None, None]
        centres = torch.stack(((weights * xs).sum((1, 2)), (weights * ys).sum((1, 2))), -1)  # [F, 2]
        travel = _travel(centres[present], torch.nonzero(present)[:, 0].float(), frames)
        overlaps = _overlaps(mask[present], centres[present], areas[present], xs, ys)
        best = int(overlaps.argmax())
        readings.append(
            ObjectReading(
                colour=colour,
                shape=SHAPES[best] if overlaps[best] >= MIN_OVERLAP else None,
                direction=_direction(travel),
                travel=travel,
                area=float(areas.median()),
                overlap=float(overlaps[best]),
            )
        )
    return sorted(readings, key=lambda reading: -reading.area)


def _travel(centres: torch.Tensor, numbers: torch.Tensor, frames: int) -> tuple[float, float]:
    """Displacement over the whole clip of the least-squares line through the centres [n, 2] at frame `numbers` [n]."""
    deviation = numbers - numbers.mean()
    slope = (deviation[:, None] * (centres - centres.mean(0))).sum(0) / deviation.square().sum().clamp(min=1e-6)
    x, y = (slope * (frames - 1)).tolist()
    return x, y


def _direction(travel: tuple[float, float]) -> str | None:
    if math.hypot(*travel) < MIN_TRAVEL:
        return None
    return max(DIRECTION_NAMES, key=lambda name: travel[0] * DIRECTIONS[name][0] + travel[1] * DIRECTIONS[name][1])


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


def expected_objects(scene: SceneAttributes) -> tuple[ExpectedObject, ...]:
    """What the video of a scene must show."""
    return tuple(ExpectedObject(item.colour, item.shape, item.direction) for item in scene.objects)


def score_readings(readings: Sequence[ObjectReading], expected: Sequence[ExpectedObject]) -> PromptMatch:
    """Compare what was read with what was asked for.

    Colours match when exactly the colours asked for are there, no more and no fewer objects. Shape and direction are
    compared object by object; objects are paired by colour first, then what is left over by area, so that a wrong
    colour alone does not count as a wrong shape. What the prompt leaves open (None) always matches.

    Raises:
        ValueError: `expected` is empty.
    """
    if not expected:
        raise ValueError("expected must name at least one object")
    left = list(readings)
    pairs: list[tuple[ExpectedObject, ObjectReading | None]] = []
    rest = []
    for want in expected:
        found = next((reading for reading in left if reading.colour == want.colour), None)
        if found is None:
            rest.append(want)
        else:
            left.remove(found)
            pairs.append((want, found))
    colour = not [want for want in rest if want.colour is not None] and len(readings) == len(expected)
    pairs += [(want, left.pop(0) if left else None) for want in rest]
    matches = lambda name: all(
        getattr(want, name) is None or (found is not None and getattr(found, name) == getattr(want, name))
        for want, found in pairs
    )
    return PromptMatch(colour=colour, shape=matches("shape"), direction=matches("direction"))


def score_video(video: torch.Tensor | np.ndarray, prompt: str | SceneAttributes) -> PromptMatch:
    """Score one clip [F, Y, X, 3] against a prompt in English or against known attributes.

    Raises:
        ValueError: the prompt names no shape or colour that the reader knows, or `video` is not a clip.
    """
    expected = expected_objects(prompt) if isinstance(prompt, SceneAttributes) else parse_prompt(prompt)
    if not expected:
        known = f"shapes {', '.join(SHAPES)} and none of the colours {', '.join(COLOURS)}"
        raise ValueError(f"prompt names none of the {known}")
    return score_readings(read_video(video), expected)


_WORDS: dict[str, tuple[str, str]] = {}
for _kind, _table in (("colour", COLOUR_WORDS), ("shape", SHAPE_WORDS), ("direction", DIRECTION_WORDS)):
    for _name, _phrases in _table.items():
        for _phrase in _phrases:
            _WORDS[_phrase] = (_kind, _name)
for _name, _verbs in SOLE_VERBS.items():
    for _pair in _verbs:
        for _phrase in _pair:
            _WORDS[_phrase] = ("direction", _name)
_WORD_PATTERN = re.compile(
    r"(?<![\w-])(" + "|".join(re.escape(phrase) for phrase in sorted(_WORDS, key=len, reverse=True)) + r")(?![\w-])"
)
_CAMERA = re.compile(r"camera \w+ (to the )?(left|right|upwards|up|downwards|down)")
_GROUND = re.compile(r"[\w\s-]*?\b(background|backdrop)\b")
_GROUND_PHRASE = re.compile(r"\b(over|on|against|across|in front of) (an? |the )?[\w\s-]*?\b(background|backdrop)\b")


def parse_prompt(prompt: str) -> tuple[ExpectedObject, ...]:
    """Read colour, shape and direction of each object (two at most) out of a prompt; unknown wording yields None or ().

    Camera movements and the background are skipped.
    """
    text = " ".join(prompt.lower().split())
    text = _CAMERA.sub(" ", text)
    text = _GROUND_PHRASE.sub(" ; ", text)
    text = ",".join(_GROUND.sub(" ", part) for part in text.split(","))
    found = [(match.start(), *_WORDS[match.group(1)]) for match in _WORD_PATTERN.finditer(text)]
    anchors = [at for at, kind, _ in found if kind == "shape"] or [at for at, kind, _ in found if kind == "colour"]
    anchors = anchors[:2]
    if not anchors:
        return ()
    values: list[dict[str, str]] = [{} for _ in anchors]
    for at, kind, name in found:
        if kind == "direction":
            owner = max([n for n, anchor in enumerate(anchors) if anchor < at], default=0)
        else:
            owner = min(range(len(anchors)), key=lambda n: abs(anchors[n] - at))
        values[owner].setdefault(kind, name)
    return tuple(ExpectedObject(value.get("colour"), value.get("shape"), value.get("direction")) for value in values)


def reader_accuracy(clips: int, seed: int, vae: Any = None, device: str = "cpu") -> dict[str, float]:
    """Share of rendered clips, of all attribute combinations, that the reader reads correctly.

    With `vae`, the clips go through its stock encode and decode first, and their mean PSNR in dB is reported.
    """
    triples = [(s, c, d) for s in range(len(SHAPES)) for c in range(len(COLOURS)) for d in range(len(DIRECTIONS))]
    scenes = sample_scenes(clips, seed, triples=triples)
    scores, psnrs = [], []
    for start in range(0, clips, 8):
        video = render(scenes[start : start + 8], device)
        if vae is not None:
            with torch.no_grad():
                output = vae.decode(vae.encode(video.to(vae.dtype)).latent_dist.mode()).sample.float()
            psnrs += (-10 * torch.log10(((output - video).square() / 4).flatten(1).mean(1))).tolist()
            video = output
        for offset, clip in enumerate(((video + 1) / 2).permute(0, 2, 3, 4, 1)):
            scores.append(score_readings(read_video(clip), expected_objects(scenes.scene(start + offset))))
    return {"clips": clips, **_shares(scores), **({"psnr_db": round(sum(psnrs) / len(psnrs), 2)} if psnrs else {})}


def _shares(scores: Sequence[PromptMatch]) -> dict[str, float]:
    names = ("colour", "shape", "direction", "all")
    return {name: round(sum(getattr(score, name) for score in scores) / len(scores), 4) for name in names}


def generate(
    pipe: Any, prompts: Sequence[str], *, seed: int, batch: int, steps: int, guidance: float, size: tuple[int, int, int]
) -> torch.Tensor:
    """Videos [B, F, Y, X, 3] in [0, 1] on the CPU; prompt i starts from the noise of seed + i, whatever the batch."""
    height, width, frames = size
    videos = []
    for start in range(0, len(prompts), batch):
        chunk = list(prompts[start : start + batch])
        generators = [torch.Generator("cpu").manual_seed(seed + start + i) for i in range(len(chunk))]
        output = pipe(
            chunk,
            height=height,
            width=width,
            num_frames=frames,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            output_type="pt",
        ).frames
        videos.append(output.permute(0, 1, 3, 4, 2).float().cpu())
    return torch.cat(videos)


def score_videos(
    videos: torch.Tensor, held_out: Sequence[HeldOutPrompt], reference: torch.Tensor | None, device: str | torch.device
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Score videos [B, F, Y, X, 3] of as many prompts: (shares and means, what was read in each video).

    Args:
        reference: videos of the same prompts and seeds; with them come PSNR and SSIM.
    """
    from vmonarch.eval.similarity import psnr, ssim

    scores, similarities, entries = [], [], []
    for i, (item, video) in enumerate(zip(held_out, videos, strict=True)):
        readings = read_video(video.to(device))
        score = score_readings(readings, expected_objects(item.scene))
        scores.append(score)
        entry = {**asdict(score), "read": [asdict(reading) for reading in readings]}
        if reference is not None:
            frames, other = (clip.to(device).permute(0, 3, 1, 2).clamp(0, 1) for clip in (video, reference[i]))
            entry |= {"psnr_db": round(psnr(frames, other), 3), "ssim": round(ssim(frames, other), 4)}
            similarities.append((entry["psnr_db"], entry["ssim"]))
        entries.append(entry)
    summary = _shares(scores)
    if similarities:
        means = torch.tensor(similarities, dtype=torch.float64).mean(0).tolist()
        summary |= {"psnr_db": round(means[0], 2), "ssim": round(means[1], 4)}
    return summary, entries


def contact_sheet(videos: torch.Tensor, path: Path, frames: int = 6, columns: int = 2) -> None:
    """Write a PNG with `frames` frames of each video [B, F, Y, X, 3] side by side, `columns` videos per row."""
    from PIL import Image

    picked = videos[:, torch.linspace(0, videos.shape[1] - 1, frames).round().long()]
    strips = torch.nn.functional.pad(torch.cat(tuple(picked.unbind(1)), 2), (0, 0, 0, 4, 0, 2))  # [B, Y, frames·X, 3]
    strips = torch.nn.functional.pad(strips, (0, 0, 0, 0, 0, 0, 0, -len(strips) % columns))
    rows = [torch.cat(tuple(strips[i : i + columns]), 1) for i in range(0, len(strips), columns)]
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((torch.cat(rows) * 255).round().byte().numpy()).save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate the held-out prompts with each method, score them, and write the JSON."""
    from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS as settings

    parser = script_parser("prompt_score", main.__doc__)
    parser.add_argument("--model", type=Path, help="folder of a Wan pipeline (default: the embedded model)")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["full", "vmonarch"],
        help="attention methods as `vmonarch compare` takes them, full first",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16, help="prompts generated at once")
    parser.add_argument("--prompts", type=int, default=64, help="how many of the 64 held-out prompts")
    parser.add_argument("--seed", type=int, default=0, help="prompt i uses seed + i")
    parser.add_argument("--steps", type=int, default=settings.num_inference_steps)
    parser.add_argument("--guidance", type=float, default=settings.guidance_scale)
    parser.add_argument("--height", type=int, default=settings.height, help="pixels, as the model was trained with")
    parser.add_argument("--width", type=int, default=settings.width)
    parser.add_argument("--flow-shift", type=float, help="override the shipped scheduler's")
    parser.add_argument("--reader-clips", type=int, default=256, help="rendered clips to check the reader on; 0: none")
    parser.add_argument("--sheet", type=Path, help="prefix of PNG contact sheets to write, one per method")
    options = parser.parse_args(arguments)
    if options.methods[0] != "full":
        parser.error("--methods must start with full: PSNR and SSIM are measured against it")
    try:
        methods = [resolve_method(name, argument="--methods") for name in options.methods]
        folder = find_model(str(options.model or "embedded"))
    except (InputError, ModelError) as error:
        parser.error(str(error))
    if not 1 <= options.prompts <= 64 or options.batch < 1:
        parser.error("--prompts must be 1 to 64 and --batch at least 1")

    from diffusers import WanPipeline

    pipe = read_pipeline(WanPipeline, folder, torch.float32).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    if options.flow_shift is not None:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, flow_shift=options.flow_shift)
    held_out = held_out_prompts()[: options.prompts]
    results: list[dict[str, Any]] = [
        {"prompt": item.prompt, "expected": [asdict(want) for want in expected_objects(item.scene)]}
        for item in held_out
    ]
    summary: dict[str, dict[str, float]] = {}
    reference: torch.Tensor | None = None
    for attention in methods:
        method = attention.label
        started = time.perf_counter()
        attention.install(pipe)
        videos = generate(
            pipe,
            [item.prompt for item in held_out],
            seed=options.seed,
            batch=options.batch,
            steps=options.steps,
            guidance=options.guidance,
            size=(options.height, options.width, settings.num_frames),
        )
        seconds = time.perf_counter() - started
        if options.sheet is not None:
            contact_sheet(videos, options.sheet.with_name(f"{options.sheet.name}-{file_name(method)}.png"))
        shares, entries = score_videos(videos, held_out, reference, options.device)
        summary[method] = {**shares, "seconds": round(seconds, 1)}
        for row, entry in zip(results, entries, strict=True):
            row[method] = entry
        if reference is None:
            reference = videos
        print(method, json.dumps(summary[method]), flush=True)
    reader = {}
    if options.reader_clips:
        reader["rendered"] = reader_accuracy(options.reader_clips, 31_337, None, options.device)
        reader["reconstructed"] = reader_accuracy(options.reader_clips, 31_337, pipe.vae, options.device)
        print("reader", json.dumps(reader), flush=True)
    document = {
        **script_record("prompt_score", arguments, options.device),
        "settings": {
            "prompts": options.prompts,
            "seed": options.seed,
            "steps": options.steps,
            "guidance_scale": options.guidance,
            "flow_shift": pipe.scheduler.config.get("flow_shift"),
            "height": options.height,
            "width": options.width,
            "num_frames": settings.num_frames,
            "dtype": str(pipe.transformer.dtype),
        },
        "reader": reader,
        "summary": summary,
        "prompts": results,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.output, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
