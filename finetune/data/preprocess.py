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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from tqdm import tqdm

from vmonarch.configs import InputError, Settings, number
from vmonarch.files import AtomicFiles, write_json
from vmonarch.finetune import scenes
from vmonarch.finetune.checkpoints import hold
from vmonarch.finetune.config import require
from vmonarch.finetune.data.captions import read_captions
from vmonarch.finetune.data.decode import BadVideo, Clip, ClipShape, decode_clip
from vmonarch.finetune.data.loader import ahead
from vmonarch.finetune.data.parquet import EMPTY_CAPTION, TEXT_LENGTH, DataError, Sample, write_shard
from vmonarch.pipelines.config import check_sizes, recommended_settings
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS
from vmonarch.pipelines.environment import choose_device, choose_dtype
from vmonarch.pipelines.loading import read_pipeline
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model
from vmonarch.pipelines.outputs import changes, prepare_output_dir
from vmonarch.pipelines.sampling import deterministic_convolutions

FORMAT = "vmonarch-preprocess-1"
# What says where and how patiently, not what the rows are.
_FREE = tuple(f"config.{name}" for name in ("captions", "output", "model", "revision", "workers", "timeout"))


@dataclass(frozen=True)
class PreprocessConfig(Settings):
    """What to prepare for which model. None means: what the model recommends.

    Args:
        videos: folder of the videos.
        captions: JSON lines, see `read_captions`; None for a text file beside each video.
        procedural: instead of videos, so many clips of the embedded model's coloured shapes.
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
        """Float32 [L, D]: the tokens that the attention mask marks; zeros after them give the pipeline's own rows."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        embeds, _ = self.pipe.encode_prompt(
            caption, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH, device=self.pipe.device
        )
        how = {"max_length": TEXT_LENGTH, "truncation": True, "return_attention_mask": True}
        tokens = self.pipe.tokenizer(prompt_clean(caption), **how)
        return embeds[0, : sum(tokens.attention_mask)].float().cpu()

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
            from PIL import Image

            picture = ((video[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            feature = self.pipe.encode_image(Image.fromarray(picture.permute(1, 2, 0).numpy()), self.pipe.device)
            extras["clip_feature"] = feature[0].float().cpu()
        return extras


def load_encoders(config: PreprocessConfig, folder: ModelFolder) -> PipelineEncoders:
    """Load tokenizer, text encoder and VAE for a completed config, and the image encoder if the model has one.

    Raises:
        InputError: the device is not to be had.
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


class _Output:
    """The output folder: what is in it, and what is added.

    Args:
        about: what the rows are made of, for the manifest.

    Raises:
        InputError: it holds the work of other settings, or what cannot be read.

    Attributes:
        videos: that of each row in its shards. bad: reasons by video.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.videos, self.bad = folder, list[str](), dict[str, str]()
        # Of a run that was killed.
        for path in folder.glob(".*.partial.*"):
            path.unlink()
        path, listed = folder / "manifest.json", folder / "quarantine.jsonl"
        try:
            if self.shards or path.exists() or listed.exists():
                before = json.loads(path.read_text(encoding="utf-8"))
                changed = "; ".join(changes({key: before[key] for key in about}, about, _FREE))
                problem = f"{str(folder)!r} holds other work: {changed}; choose another folder"
                require(not changed, "output", problem)
            else:
                write_json(path, dict(about))
            for path in self.shards:
                self.videos += pq.read_table(path, columns=["id"])["id"].to_pylist()
            if (path := listed).exists():
                entries = [json.loads(line) for line in path.read_bytes().split(b"\n") if line]
                self.bad = {entry["file"]: entry["reason"] for entry in entries}
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise InputError("output", f"holds {path}, which cannot be read: {error!r}") from error

    @property
    def shards(self) -> list[Path]:
        """All that are there."""
        return sorted(self.folder.glob("shard-*.parquet"))

    def quarantine(self, file: str, reason: str) -> None:
        """Note a bad video."""
        self.bad[file] = reason
        lines = (json.dumps({"file": f, "reason": why}, ensure_ascii=False) for f, why in self.bad.items())
        with AtomicFiles(overwrite=True) as files:
            path = files.stage(self.folder / "quarantine.jsonl")
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def write_shard(self, samples: Sequence[Sample]) -> None:
        """Write the next shard."""
        last = max((int(path.stem.removeprefix("shard-")) for path in self.shards), default=-1)
        write_shard(self.folder / f"shard-{last + 1:05d}.parquet", samples)
        self.videos += [sample.id for sample in samples]


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
        output = _Output(path, about)
        done = {*output.videos, *output.bad}
        todo = [name for name in names if name not in done]
        if todo:
            bar = tqdm(total=len(names), initial=len(names) - len(todo), disable=not progress, unit="video")
            with bar, deterministic_convolutions():
                _fill(output, config, captions, todo, encoders or load_encoders(config, folder), bar)
    if not output.videos:
        file, reason = next(iter(output.bad.items()))
        why = f"{path / 'quarantine.jsonl'} says why, and first: {file} {reason}"
        raise DataError(f"no clip could be made of {len(names)} videos; {why}")
    return {"clips": len(output.videos), "shards": len(output.shards), "quarantined": len(output.bad)}


def _fill(
    output: _Output,
    config: PreprocessConfig,
    captions: Mapping[str, str],
    todo: Sequence[str],
    encoders: PipelineEncoders,
    bar: Any,
) -> None:
    """Write the shards of the videos in `todo`, in order; bad ones go to quarantine on the way."""
    cropped = 0
    if not (empty := output.folder / EMPTY_CAPTION).exists():
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
            output.quarantine(name, str(error))
        bar.update()
        bar.set_postfix(bad=len(output.bad), cropped=cropped, refresh=False)
        if len(rows) >= config.rows_per_shard:
            output.write_shard(rows)
            rows = []
    if rows:
        output.write_shard(rows)


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
