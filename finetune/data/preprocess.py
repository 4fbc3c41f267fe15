"""From captioned videos to FastVideo's parquet: the library behind `vmonarch preprocess`.

    from vmonarch.finetune.data.preprocess import PreprocessConfig, preprocess

    preprocess(PreprocessConfig(videos="clips", captions="clips/captions.jsonl", output="data/clips"))

The output folder holds `shard-00000.parquet` and on, `quarantine.jsonl` (bad files with reasons) and `manifest.json`.
Work that was broken off, at any moment, goes on where it was: the order of the rows is that of the captions, a shard
appears complete or not at all, and a video is not tried again once it is in a shard or in quarantine.

Tensors are stored as float32: FastVideo's reader takes every tensor for that, whatever the column of its dtype says.

Legend: F frames, H and W pixels, C latent channels, T latent frames, y and x latent pixels, L tokens, D their size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file
from tqdm import tqdm

from vmonarch.configs import InputError, Settings, number
from vmonarch.files import AtomicFiles, prepare_output_dir, write_json
from vmonarch.finetune import scenes
from vmonarch.finetune.checkpoints import hold
from vmonarch.finetune.config import require
from vmonarch.finetune.data.decode import BadVideo, Clip, ClipShape, decode_clip
from vmonarch.finetune.data.loader import ahead
from vmonarch.finetune.data.parquet import EMPTY_CAPTION, TEXT_LENGTH, DataError, Sample, write_shard
from vmonarch.pipelines.config import check_sizes, recommended_settings
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS
from vmonarch.pipelines.environment import choose_device, choose_dtype
from vmonarch.pipelines.loading import read_pipeline
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model
from vmonarch.pipelines.outputs import changes
from vmonarch.pipelines.sampling import deterministic_convolutions

FORMAT = "vmonarch-preprocess-1"
# Suffixes of videos, where no file of captions names them.
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".gif")
_FORM = "must be UTF-8 JSON lines with text as file_name (a path within the folder of videos) and as caption"
_SHARDS, _QUARANTINE = "shard-*.parquet", "quarantine.jsonl"
# Settings that say where and how long, and do not change the rows.
_FREE = tuple(f"config.{name}" for name in ("captions", "output", "model", "revision", "workers", "timeout"))


@dataclass(frozen=True)
class PreprocessConfig(Settings):
    """Which videos to prepare for which model. None means: what the model recommends.

    Args:
        videos: folder of the videos.
        captions: JSON lines, see `read_captions`; None for a text file beside each video.
        procedural: instead of videos, this many clips of the embedded model's coloured shapes.
        model: `embedded`, the folder of a Wan pipeline, or a hub id.
        revision: branch, tag or commit of a hub model.
        output: folder of the shards, created when missing (default: outputs/preprocess).
        height, width: pixels, multiples of 16 (of 32 for some models).
        num_frames: of a clip, 4·k + 1.
        fps: frames per second of the clips; None leaves those of each file.
        device: auto, cpu, cuda or cuda:N. The VAE runs in float32, on a GPU the other encoders in bfloat16.
        rows_per_shard: clips of a file, which are in memory until it is written.
        workers: videos decoded at a time, ahead of the encoders, each by one thread.
        seed: of the procedural clips.
        timeout: seconds that decoding a video may take; it is decoded twice.

    Raises:
        InputError: a value that no model supports; the error names the field.
    """

    videos: str | None = None
    captions: str | None = None
    procedural: int | None = number(None, "[1, inf)")
    model: str = "embedded"
    revision: str | None = None
    output: str = "outputs/preprocess"
    height: int | None = number(None, "[1, 8192]")
    width: int | None = number(None, "[1, 8192]")
    num_frames: int | None = number(None, "[1, inf)")
    fps: float | None = number(None, "[0.001, 1000]")
    device: str = "auto"
    rows_per_shard: int = number(32, "[1, inf)")
    workers: int = number(4, "[1, inf)")
    seed: int = 0
    timeout: float = number(120.0, "(0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        source = "must be given, or procedural=N for clips without videos; not both"
        require((self.procedural is None) != (self.videos is None), "videos", source)
        require(self.videos or self.captions is None, "captions", "must be given with videos only")

    @property
    def shape(self) -> ClipShape:
        """Of all clips, of a completed config."""
        assert self.height and self.width and self.num_frames
        return ClipShape(self.height, self.width, self.num_frames, self.fps)


def complete(config: PreprocessConfig, model: ModelFolder) -> PreprocessConfig:
    """`config` with the model's recommendation in place of None, checked against what its VAE can take.

    Raises:
        InputError: a size that does not fit the model or, for procedural clips, that they do not have.
    """
    recommended = recommended_settings(model)
    changes = {name: recommended[name] for name in ("height", "width", "num_frames") if getattr(config, name) is None}
    if config.videos is not None:
        changes["videos"] = str(Path(config.videos).expanduser().resolve())
    config = dataclasses.replace(config, **changes)
    check_sizes(config.shape, model.multiples, model.temporal, " for this model")
    if config.procedural is not None:
        own = dict(height=scenes.HEIGHT, width=scenes.WIDTH, num_frames=scenes.NUM_FRAMES, fps=None)
        for name, only in own.items():
            problem = f"must be {'null' if only is None else only} for procedural clips, got {getattr(config, name)}"
            require(getattr(config, name) == only, name, problem)
    return config


def read_captions(videos: Path, path: str | None) -> dict[str, str]:
    """The captions of a folder's videos by their files, in the order of the file of captions, or by name.

    JSON lines are objects with `file_name` and `caption`. Other keys and empty lines are passed over. Without such a
    file, `sub/a.txt` holds the caption of `sub/a.mp4`, and all videos must have one. Names are the same that look so:
    of one name macOS writes another form of Unicode than other systems. Those returned are relative, with `/`, as they
    are on the disk.

    Raises:
        InputError: there is no such file, it is not UTF-8 or JSON lines, a row lacks one of the two, a video's
            path is absolute or leads out of its folder, a video is there twice or has no caption, or there is none.
    """
    on_disk = (file.relative_to(videos).as_posix() for file in sorted(videos.rglob("*")) if file.is_file())
    files = {unicodedata.normalize("NFC", file): file for file in on_disk}
    captions: dict[str, str] = {}
    for name, caption in _beside(videos, files) if path is None else _in_file(path):
        file = files.get(unicodedata.normalize("NFC", name), name)
        require(file not in captions, "captions", f"must name each video once; {file!r} is there twice")
        captions[file] = caption
    require(captions, "captions", f"must be of at least one video; {path or str(videos)!r} has none")
    return captions


def _beside(videos: Path, files: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, file in files.items():
        path = PurePosixPath(name)
        if path.suffix.lower() in VIDEOS and not path.name.startswith("."):
            text = path.with_suffix(".txt")
            try:
                yield name, (videos / files.get(str(text), text)).read_text(encoding="utf-8-sig").strip()
            except (OSError, ValueError) as error:
                problem = f"must be given, or lie in a UTF-8 text file beside each video; that of {file!r} does not"
                raise InputError("captions", f"{problem}: {error}") from error


def _in_file(path: str) -> Iterator[tuple[str, str]]:
    done = 0
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
        # Not splitlines: JSON may hold separators that it takes for ends of lines.
        for row in map(json.loads, filter(str.strip, text.split("\n"))):
            # Half a pair of UTF-16 cannot be stored.
            file, caption = PurePosixPath(row["file_name"]), row["caption"].encode().decode()
            if file.is_absolute() or ".." in file.parts:
                raise ValueError(f"it has {row!r}")
            yield str(file), caption
            done += 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError("captions", f"{_FORM}; {path!r} is not, in row {done + 1}: {error}") from error


@dataclass(frozen=True)
class PipelineEncoders:
    """Text encoder, VAE and image encoder of a stock diffusers pipeline, called as its own code calls them.

    Args:
        takes_image: its transformer cannot do without a first frame.
    """

    pipe: Any
    takes_image: bool

    @torch.no_grad()
    def text(self, caption: str) -> torch.Tensor:
        """Float32 [L, D]: the pipeline's own rows without the zeros that it fills up with."""
        embeds, _ = self.pipe.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH, device=self.pipe.device
        )
        return embeds[0, embeds[0].any(1)].float().cpu()

    @torch.no_grad()
    def latents(self, video: torch.Tensor) -> torch.Tensor:
        """The VAE's means [C, T, y, x] as they are."""
        vae = self.pipe.vae
        return vae.encode(video[None].to(vae.device, vae.dtype)).latent_dist.mode()[0].float().cpu()

    @torch.no_grad()
    def image(self, video: torch.Tensor) -> dict[str, torch.Tensor]:
        """`first_frame_latent` [C, T, y, x], and `clip_feature` [tokens, D] if the pipeline has an image encoder.

        The latents are those that the pipeline gives the transformer beside its mask: of the first frame with zeros
        after it, normalised by the VAE's statistics. FastVideo stores the same. Models that take no image get nothing.
        """
        if not self.takes_image:
            return {}
        size = dict(zip(("num_frames", "height", "width"), video.shape[1:], strict=True))
        given = {"dtype": torch.float32, "device": self.pipe.device, "latents": torch.empty(0)}
        _, condition, *_ = self.pipe.prepare_latents(video[None, :, 0].to(self.pipe.device), 1, **size, **given)
        # Channels of a mask may come before them.
        extras = {"first_frame_latent": condition[0, -self.pipe.vae.config.z_dim :].cpu()}
        if getattr(self.pipe, "image_encoder", None) is not None:
            picture = ((video[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            feature = self.pipe.encode_image(Image.fromarray(picture.permute(1, 2, 0).numpy()), self.pipe.device)
            extras["clip_feature"] = feature[0].float().cpu()
        return extras


def load_encoders(config: PreprocessConfig, folder: ModelFolder) -> PipelineEncoders:
    """Load tokenizer, text encoder and VAE for a completed config, and the image encoder if the model has one.

    Raises:
        InputError: the device is not available.
        ModelError: a component cannot be loaded.
    """
    import diffusers

    device = choose_device(config.device)
    left_out = dict.fromkeys(("transformer", "transformer_2", "scheduler"))
    pipe = read_pipeline(getattr(diffusers, folder.pipeline), folder, choose_dtype("auto", device), **left_out)
    return PipelineEncoders(pipe.to(device), folder.image_conditioned)


def procedural_clip(seed: int, number: int) -> tuple[str, Clip]:
    """Caption and clip [3, 61, 96, 160] of the embedded model's world; a function of seed and number alone.

    Its combinations of shape, colour and direction are among those that training may show.
    """
    # Halves of a hash: neither neighbouring numbers nor neighbouring seeds share a clip.
    digest = hashlib.sha256(f"procedural {seed} {number}".encode()).digest()
    scene = scenes.sample_scene(int.from_bytes(digest[:7]))
    text = scenes.caption(scene.shown, random.Random(int.from_bytes(digest[8:])))
    return text, Clip(scenes.render(scene), float(EMBEDDED_SETTINGS.fps))


def _resume(folder: Path, about: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """(the videos in the shards of an output folder, the reason for each in quarantine); a new one gets its manifest.

    Args:
        about: what the rows are made of, for the manifest.

    Raises:
        InputError: it holds the work of other settings, or what cannot be read.
    """
    # Left by a run that was killed.
    for path in folder.glob(".*.partial.*"):
        path.unlink()
    shards, path, listed = sorted(folder.glob(_SHARDS)), folder / "manifest.json", folder / _QUARANTINE
    videos, entries = list[str](), list[dict[str, str]]()
    if not (shards or path.exists() or listed.exists()):
        write_json(path, dict(about))
        return videos, {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = "; ".join(changes({key: before[key] for key in about}, about, _FREE))
        for path in shards:
            videos += pq.read_table(path, columns=["id"])["id"].to_pylist()
        if (path := listed).exists():
            entries = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
        bad = {entry["file"]: entry["reason"] for entry in entries}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise InputError("output", f"holds {path}, which cannot be read: {error!r}") from error
    require(not changed, "output", f"{str(folder)!r} holds other work: {changed}; choose another folder")
    return videos, bad


def preprocess(
    config: PreprocessConfig, *, progress: bool = False, encoders: PipelineEncoders | None = None
) -> dict[str, int]:
    """Prepare all clips that `config` names and that are not in its output folder yet.

    Args:
        progress: show on stderr how far it is, and how many videos are bad or cropped.
        encoders: instead of those of the model.

    Returns:
        how many `clips` and `shards` are in the folder, and how many videos are `quarantined`.

    Raises:
        InputError: an argument that cannot be used, found before any work; or the output folder holds the work of
            another config, model or captions.
        ModelError: the model folder is missing something, damaged or unsupported.
        DataError: no clip could be made.
    """
    captions: dict[str, str] = {}
    if config.videos is not None:
        videos = Path(config.videos).expanduser()
        require(videos.is_dir(), "videos", f"must be a folder; there is none at {config.videos!r}")
        captions = read_captions(videos, config.captions)
    folder = find_wan_model(config.model, config.revision)
    config = complete(config, folder)
    choose_device(config.device)
    about = {
        "format": FORMAT,
        "config": config.to_dict(),
        "captions_sha256": hashlib.sha256(json.dumps(list(captions.items())).encode()).hexdigest(),
        "model": folder.fingerprint(),
    }
    path = prepare_output_dir(config.output, "output")
    names = list(captions) or [f"procedural-{config.seed}-{k}" for k in range(config.procedural or 0)]
    with hold(path, "output"):
        made, bad = _resume(path, about)
        done = {*made, *bad}
        todo = [name for name in names if name not in done]
        if todo:
            bar = tqdm(total=len(names), initial=len(names) - len(todo), disable=not progress, unit="video")
            with bar, deterministic_convolutions():
                _fill(path, config, captions, todo, bad, encoders or load_encoders(config, folder), bar)
            made += [name for name in todo if name not in bad]
    if not made:
        file, reason = next(iter(bad.items()))
        why = f"{path / _QUARANTINE} says why, and first: {file} {reason}"
        raise DataError(f"no clip could be made of {len(names)} videos; {why}")
    return {"clips": len(made), "shards": len(list(path.glob(_SHARDS))), "quarantined": len(bad)}


def _fill(
    output: Path,
    config: PreprocessConfig,
    captions: Mapping[str, str],
    todo: Sequence[str],
    bad: dict[str, str],
    encoders: PipelineEncoders,
    bar: Any,
) -> None:
    """Write the shards of the videos in `todo`, in order; on the way bad ones join those in quarantine."""
    cropped = 0
    if not (empty := output / EMPTY_CAPTION).exists():
        with AtomicFiles() as files:
            save_file({"text_embedding": encoders.text("")}, files.stage(empty))
    rows: list[Sample] = []
    for name, future in ahead(partial(_clip, config, captions), todo, config.workers):
        try:
            caption, clip = future.result()
            rows.append(_row(name, caption, clip, encoders))
            # Sizes are whole pixels: no more than that is lost of a picture that has the shape of the clips.
            cropped += clip.kept < 0.98
        except BadVideo as error:
            bad[name] = str(error)
            lines = (json.dumps({"file": f, "reason": why}, ensure_ascii=False) + "\n" for f, why in bad.items())
            with AtomicFiles(overwrite=True) as files:
                files.stage(output / _QUARANTINE).write_text("".join(lines), encoding="utf-8")
        bar.update()
        bar.set_postfix(bad=len(bad), cropped=cropped, refresh=False)
        if len(rows) >= config.rows_per_shard or (rows and name == todo[-1]):
            last = max((int(path.stem.removeprefix("shard-")) for path in output.glob(_SHARDS)), default=-1)
            write_shard(output / f"shard-{last + 1:05d}.parquet", rows)
            rows = []


def _clip(config: PreprocessConfig, captions: Mapping[str, str], name: str) -> tuple[str, Clip]:
    """Caption and clip of a video.

    Raises:
        BadVideo: it is to blame, whatever the error.
    """
    if config.procedural:
        return procedural_clip(config.seed, int(name.rpartition("-")[2]))
    try:
        path = Path(str(config.videos), name)
        return captions[name], decode_clip(path, config.shape, timeout=config.timeout)
    except OSError:
        # The video is not to blame when ffmpeg cannot be started.
        raise
    except Exception as error:
        raise BadVideo(str(error) or repr(error)) from error


def _row(name: str, caption: str, clip: Clip, encoders: PipelineEncoders) -> Sample:
    """The clip of a video, encoded."""
    text = encoders.text(caption)
    video = clip.frames if clip.frames.is_floating_point() else clip.frames.float() / 127.5 - 1
    frames, height, width = video.shape[1:]
    tensors = {"latents": encoders.latents(video), **encoders.image(video)}
    if not all(x.isfinite().all() for x in (text, *tensors.values())):
        raise BadVideo("has encodings that are not finite")
    about = {"file_name": name, "caption": caption, "width": width, "height": height, "fps": clip.fps}
    about["duration_sec"] = frames / clip.fps if clip.fps else 0.0
    return Sample(name, tensors.pop("latents"), text, tensors, about)
