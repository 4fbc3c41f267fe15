"""From captioned videos to FastVideo's parquet: the library behind `vmonarch preprocess`.

    from vmonarch.finetune.data.preprocess import PreprocessConfig, preprocess

    preprocess(PreprocessConfig(videos="clips", captions="clips/captions.jsonl", output="data/clips"))

The output folder holds `shard-00000.parquet` and on, `quarantine.jsonl` (bad files with reasons) and `manifest.json`.
Work that was broken off, at any moment, goes on where it was: the order of the rows is that of the captions, a shard
appears complete or not at all, and a file is not tried again once its clips are in a shard or it is in quarantine.

Tensors are stored as float32 unless told otherwise: FastVideo's reader takes every tensor for float32, whatever the
column of its dtype says. float16 would do for the latents (it costs 2e-4 of their norm) where only our reader matters.

Legend: F frames, H and W pixels, C latent channels, T latent frames, y and x latent pixels, L tokens, D their size.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import random
import re
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from vmonarch.configs import InputError, build, file_sha256
from vmonarch.files import write_json
from vmonarch.finetune.config import check_values, choice, number
from vmonarch.finetune.data.captions import Captioned, read_captions
from vmonarch.finetune.data.decode import BadVideo, Clip, ClipShape, decode_clips
from vmonarch.finetune.data.parquet import EMPTY_CAPTION, TEXT_LENGTH, Sample, write_empty_caption, write_shard
from vmonarch.pipelines.environment import DTYPES, choose_device, choose_dtype
from vmonarch.pipelines.kinds import IMAGE_TO_VIDEO
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model

FORMAT = "vmonarch-preprocess-1"
# Settings that say where and how patiently, not what the rows are.
_FREE = ("captions", "output", "model", "revision", "workers", "timeout")


class PreprocessError(RuntimeError):
    """No video gave a clip."""


@dataclass(frozen=True)
class PreprocessConfig:
    """What to prepare for which model. None means: what the model recommends.

    Args:
        videos: folder of the videos.
        captions: JSON lines or CSV, see `read_captions`; None for a text file beside each video.
        procedural: instead of videos, so many clips of the embedded model's coloured shapes.
        model: `embedded`, the folder of a Wan pipeline, or a hub id.
        revision: branch, tag or commit of a hub model.
        output: folder of the shards, created when missing.
        height, width: pixels, multiples of 16 (of 32 for some models).
        num_frames: of a clip, 4·k + 1.
        buckets: sizes and lengths in place of the three, each as `480x832x81` (height, width, frames). A video becomes
            clips of the one that keeps most of its picture and is not longer than it is.
        fps: frames per second of the clips; None leaves those of each file.
        start: where clips begin: `begin` or `middle`.
        clips_per_video: at most, one after the other.
        max_sequence_length: text tokens that the transformer sees, at most TEXT_LENGTH.
        image_to_video: also store the first frame's latents, and its image features if the model has an image encoder;
            None stores them for models that need them.
        dtype: auto, float32, bfloat16 or float16, of the text and image encoders; the VAE runs in float32.
        store_dtype: float32, which FastVideo reads, or float16, of all tensors but the text.
        device: auto, cpu, cuda or cuda:N.
        rows_per_shard: clips in a file.
        workers: videos decoded at a time, ahead of the encoders, each by one thread.
        seed: of the procedural clips.
        timeout: seconds that decoding one video may take.

    Raises:
        InputError: a value that no model supports; the error names the field.
    """

    videos: str | None = None
    captions: str | None = None
    procedural: int | None = number(None, least=1)
    model: str = "embedded"
    revision: str | None = None
    output: str = "outputs/preprocess"
    height: int | None = number(None, least=1, most=8192)
    width: int | None = number(None, least=1, most=8192)
    num_frames: int | None = number(None, least=1)
    buckets: tuple[str, ...] = ()
    fps: float | None = number(None, least=0.001, most=1000)
    start: str = choice("begin", "begin", "middle")
    clips_per_video: int = number(1, least=1, most=10_000)
    max_sequence_length: int | None = number(None, least=1, most=TEXT_LENGTH)
    image_to_video: bool | None = None
    dtype: str = choice("auto", *DTYPES)
    store_dtype: str = choice("float32", "float32", "float16")
    device: str = "auto"
    rows_per_shard: int = number(32, least=1)
    workers: int = number(4, least=1)
    seed: int = 0
    timeout: float = number(120.0, above=0)

    def __post_init__(self) -> None:
        check_values(self)
        if (self.procedural is None) == (self.videos is None):
            raise InputError("videos", "must be given, or procedural=N for clips without videos; not both")
        if self.procedural is not None and self.captions is not None:
            raise InputError("captions", "must be given with videos only")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InputError("device", f"must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.buckets and (self.procedural or self.height or self.width or self.num_frames):
            raise InputError("buckets", "is for videos, and in place of height, width and num_frames")
        if bad := [bucket for bucket in self.buckets if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){2}", bucket)]:
            raise InputError("buckets", f"must be written as 480x832x81 (height, width, frames), got {bad[0]!r}")

    @property
    def shapes(self) -> list[ClipShape]:
        """Of each bucket, or the one of all clips, whose sizes may be None."""
        sizes: list[Any] = [tuple(map(int, bucket.split("x"))) for bucket in self.buckets]
        sizes = sizes or [(self.height, self.width, self.num_frames)]
        return [ClipShape(h, w, f, self.fps, self.start, self.clips_per_video) for h, w, f in sizes]


def preprocess_config(*layers: Mapping[str, Any]) -> PreprocessConfig:
    """A config from layers of plain values (YAML, options, overrides), later ones over earlier ones.

    Raises:
        InputError: no output, an unknown key, or a value of another type or out of range; the error names the key.
    """
    values: dict[str, Any] = dict(chain.from_iterable(layer.items() for layer in layers))
    if values.get("output") is None:
        raise InputError("output", "is missing: name a folder")
    return build(PreprocessConfig, values)


def complete(config: PreprocessConfig, model: ModelFolder) -> PreprocessConfig:
    """`config` with the model's recommendation in place of None, checked against what its VAE can take.

    Raises:
        InputError: a size that does not fit the model or, for procedural clips, that they do not have.
    """
    from vmonarch.finetune.scenes import HEIGHT, NUM_FRAMES, WIDTH
    from vmonarch.pipelines.config import check_sizes, recommended_settings

    recommended = recommended_settings(model) | {"image_to_video": model.image_conditioned}
    names = ["max_sequence_length", "image_to_video", *(() if config.buckets else ("height", "width", "num_frames"))]
    changes = {name: recommended[name] for name in names if getattr(config, name) is None}
    if config.videos is not None:
        changes["videos"] = str(Path(config.videos).expanduser().resolve())
    config = dataclasses.replace(config, **changes)
    for shape in config.shapes:
        check_sizes(shape, model.height_multiple, model.width_multiple, model.temporal, " for this model")
    if config.procedural is not None:
        own = dict(height=HEIGHT, width=WIDTH, num_frames=NUM_FRAMES, fps=None, start="begin", clips_per_video=1)
        for name, only in own.items():
            if getattr(config, name) != only:
                raise InputError(name, f"must be {only} for procedural clips, got {getattr(config, name)}")
    return config


class PipelineEncoders:
    """Text encoder, VAE and image encoder of a stock diffusers pipeline, called as its own code calls them."""

    def __init__(self, pipe: Any, device: torch.device, max_sequence_length: int) -> None:
        self.pipe, self._device, self._length = pipe, device, max_sequence_length

    def cut(self, caption: str) -> bool:
        """Whether it has more tokens than `max_sequence_length`."""
        return len(self._tokens(caption, verbose=False).input_ids) > self._length

    def _tokens(self, caption: str, **options: Any) -> Any:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return self.pipe.tokenizer(prompt_clean(caption), **options)

    def text(self, caption: str) -> torch.Tensor:
        """Float32 [L, D]: the tokens that the attention mask marks; zeros after them give the pipeline's own rows."""
        with _exact():
            embeds, _ = self.pipe.encode_prompt(
                caption, do_classifier_free_guidance=False, max_sequence_length=self._length, device=self._device
            )
        tokens = self._tokens(caption, max_length=self._length, truncation=True, return_attention_mask=True)
        return embeds[0, : sum(tokens.attention_mask)].float().cpu()

    def latents(self, video: torch.Tensor) -> torch.Tensor:
        """The VAE's means [C, T, y, x] as they are."""
        vae = self.pipe.vae
        with _exact():
            latents = vae.encode(video[None].to(self._device, vae.dtype)).latent_dist.mode()
        return latents[0].float().cpu()

    def image(self, video: torch.Tensor) -> dict[str, torch.Tensor]:
        """`first_frame_latent` [C, T, y, x], and `clip_feature` [tokens, D] if the pipeline has an image encoder.

        The latents are those that `WanImageToVideoPipeline.prepare_latents` gives the transformer beside its mask: of
        the first frame with zeros after it (alone where the model has a timestep for each token, T = 1), normalised by
        the VAE's statistics. FastVideo stores the same.
        """
        frames = video[:, :1]
        if not self.pipe.config.get("expand_timesteps"):
            frames = torch.cat([frames, torch.zeros_like(video[:, 1:])], dim=1)
        config = self.pipe.vae.config
        mean, std = (torch.tensor(config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        # Multiplied by the inverse, as diffusers does it, to keep its bits.
        extras = {"first_frame_latent": (self.latents(frames) - mean) * (1.0 / std)}
        if getattr(self.pipe, "image_encoder", None) is not None:
            from PIL import Image

            picture = ((video[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            with _exact():
                feature = self.pipe.encode_image(Image.fromarray(picture.permute(1, 2, 0).numpy()), self._device)
            extras["clip_feature"] = feature[0].float().cpu()
        return extras


@contextmanager
def _exact() -> Iterator[None]:
    """No gradients, and the same bits each time."""
    from vmonarch.pipelines.sampling import deterministic_convolutions

    with torch.no_grad(), deterministic_convolutions():
        yield


def load_encoders(config: PreprocessConfig, folder: ModelFolder) -> PipelineEncoders:
    """Load tokenizer, text encoder and VAE for a completed config, and the image encoder if it asks for one.

    Raises:
        InputError: the device or dtype is not to be had.
        ModelError: a component cannot be loaded.
    """
    import diffusers

    from vmonarch.pipelines.loading import read_pipeline

    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    cls = getattr(diffusers, IMAGE_TO_VIDEO if config.image_to_video else folder.pipeline)
    left_out = ["transformer", "transformer_2", "scheduler"]
    if not config.image_to_video and folder.pipeline == IMAGE_TO_VIDEO:
        left_out += ["image_encoder", "image_processor"]
    pipe = read_pipeline(cls, folder, dtype, **dict.fromkeys(left_out))
    pipe.to(device)
    assert config.max_sequence_length is not None
    return PipelineEncoders(pipe, device, config.max_sequence_length)


@dataclass(frozen=True)
class _Item:
    """A video, or what stands for one.

    Args:
        file: its name in rows and in quarantine.
        ids: of the clips that it can have, in order.
        make: gives caption and clips; ends early when the event is set.
    """

    file: str
    ids: tuple[str, ...]
    make: Callable[[threading.Event], tuple[str, list[Clip]]]


def procedural_clip(seed: int, number: int) -> tuple[str, Clip]:
    """Caption and clip [3, 61, 96, 160] of the embedded model's world; a function of seed and number alone.

    Its combinations of shape, colour and direction are among those that training may show.
    """
    from vmonarch.finetune.scenes import caption, render, sample_scenes
    from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS

    # Halves of a hash: neither neighbouring numbers nor neighbouring seeds share a clip.
    digest = hashlib.sha256(f"procedural {seed} {number}".encode()).digest()
    scenes = sample_scenes(1, int.from_bytes(digest[:7]))
    text = caption(scenes.scene(0), random.Random(int.from_bytes(digest[8:])))
    return text, Clip(render(scenes)[0], float(EMBEDDED_SETTINGS.fps))


def _items(config: PreprocessConfig, captioned: Sequence[Captioned]) -> list[_Item]:
    def render(number: int, _: threading.Event) -> tuple[str, list[Clip]]:
        text, clip = procedural_clip(config.seed, number)
        return text, [clip]

    def decode(entry: Captioned, stop: threading.Event) -> tuple[str, list[Clip]]:
        path = Path(str(config.videos), entry.file)
        try:
            return entry.caption, decode_clips(path, config.shapes, timeout=config.timeout, stop=stop)
        except OSError:
            # The video is not to blame when ffmpeg cannot be started.
            raise
        except Exception as error:
            raise BadVideo(str(error) or repr(error)) from error

    names = [f"procedural-{config.seed}-{number}" for number in range(config.procedural or 0)]
    made = [_Item(name, (name,), partial(render, number)) for number, name in enumerate(names)]
    numbers = range(config.clips_per_video)
    return made + [_Item(e.file, tuple(f"{e.stem}-{k}" for k in numbers), partial(decode, e)) for e in captioned]


def _ahead(items: Iterable[_Item], workers: int) -> Generator[tuple[_Item, Future[tuple[str, list[Clip]]]]]:
    """What each item makes, in order, made by so many threads before it is asked for."""
    stop, left = threading.Event(), iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    waiting: deque[tuple[_Item, Future[tuple[str, list[Clip]]]]] = deque()
    try:
        while True:
            more = islice(left, 1 + workers - len(waiting))
            waiting.extend((item, pool.submit(item.make, stop)) for item in more)
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


class _Output:
    """The output folder: what is in it, and what is added.

    Attributes:
        manifest: what its file holds, or will hold when it is written next.
        ids: of the rows in its shards. bad: reasons by file.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """Read what a run of the same settings has left in the folder, and clear away what is half-written.

        Args:
            about: what the rows are made of, for the manifest.

        Raises:
            InputError: the folder holds other work, or what cannot be read.
        """
        self.folder, self._quarantine = folder, folder / "quarantine.jsonl"
        # As JSON has them: tuples are lists.
        self.manifest = json.loads(json.dumps(about)) | {"complete": False, "counts": {}, "shards": []}
        self.ids: list[str] = []
        self.bad: dict[str, str] = {}
        for path in folder.glob(".*.partial.*"):
            path.unlink()
        shards = sorted(folder.glob("shard-*.parquet"), key=lambda path: (len(path.name), path.name))
        path = folder / "manifest.json"
        try:
            if shards or path.exists() or self._quarantine.exists():
                before = json.loads(path.read_text(encoding="utf-8"))
                # Before 2026-11-28 there were no buckets.
                old, now = {"buckets": [], **_made_of(before)}, _made_of(self.manifest)
                changed = [f"{key} was {old.get(key)!r}, is {now[key]!r}" for key in now if old.get(key) != now[key]]
                if changed:
                    problem = f"holds other work: {'; '.join(changed)}; choose another folder"
                    raise InputError("output", f"{str(folder)!r} {problem}")
                self.manifest |= {key: before[key] for key in ("complete", "counts", "environment", "updated")}
            for path in shards:
                self._add(path)
            if (path := self._quarantine).exists():
                # A killed run may have left half a line; its file is tried again.
                whole = path.read_bytes().rpartition(b"\n")[0]
                os.truncate(path, len(whole) + 1 if whole else 0)
                entries = [json.loads(line) for line in whole.split(b"\n") if line]
                self.bad = {entry["file"]: entry["reason"] for entry in entries}
        except InputError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
            raise InputError("output", f"holds {path}, which cannot be read: {error!r}") from error

    def _add(self, path: Path) -> None:
        ids = pq.read_table(path, columns=["id"])["id"].to_pylist()
        self.ids += ids
        self.manifest["shards"].append({"file": path.name, "rows": len(ids)})

    def quarantine(self, file: str, reason: str) -> None:
        """Note a bad video."""
        self.bad[file] = reason
        with self._quarantine.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"file": file, "reason": reason}, ensure_ascii=False) + "\n")

    def write_shard(self, samples: Iterable[Sample]) -> None:
        """Write the next shard, then the manifest."""
        numbers = [int(re.sub(r"\D", "", shard["file"])) for shard in self.manifest["shards"]]
        path = self.folder / f"shard-{max(numbers, default=-1) + 1:05d}.parquet"
        write_shard(path, samples)
        self._add(path)
        self.write_manifest()

    def write_manifest(self, **facts: Any) -> None:
        """Write what is in the folder and what it was made from."""
        self.manifest |= {"updated": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
        counts = {"clips": len(self.ids), "shards": len(self.manifest["shards"]), "quarantined": len(self.bad)}
        self.manifest["counts"] |= counts
        write_json(self.folder / "manifest.json", self.manifest)


def _made_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the rows of a folder depend on, by its manifest."""
    config = {key: value for key, value in manifest["config"].items() if key not in _FREE}
    hashes = ("configs_sha256", "weights_sha256", "weights_sizes_sha256")
    model = {f"{key} of the model": manifest["model"][key] for key in hashes}
    return {"format": manifest["format"], **config, "captions_sha256": manifest["captions_sha256"], **model}


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems lock no folders.
        with suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError("output", f"{str(folder)!r} is in use by another process") from error
        yield
    finally:
        os.close(descriptor)


def preprocess(
    config: PreprocessConfig, *, progress: bool = False, encoders: PipelineEncoders | None = None
) -> dict[str, int]:
    """Prepare all clips that `config` names and that are not in its output folder yet.

    Args:
        progress: show on stderr how far it is, and how many videos are bad or cropped and captions cut.
        encoders: instead of those of the model.

    Returns:
        The counts that the manifest then has: videos, captions_cut, clips, shards, quarantined.

    Raises:
        InputError: an argument that cannot be used, found before any work; or the output folder holds the work of
            another config, model or captions.
        ModelError: the model folder is missing something, damaged or unsupported.
        PreprocessError: no clip could be made.
    """
    from vmonarch.pipelines.environment import environment, package_versions
    from vmonarch.pipelines.outputs import prepare_output_dir

    captioned: list[Captioned] = []
    if config.videos is not None:
        videos = Path(config.videos).expanduser()
        if not videos.is_dir():
            raise InputError("videos", f"must be a folder; there is none at {config.videos!r}")
        captioned = read_captions(videos, config.captions)
    folder = find_wan_model(config.model, config.revision)
    config = complete(config, folder)
    device = choose_device(config.device)
    choose_dtype(config.dtype, device)
    about = {
        "format": FORMAT,
        "config": dataclasses.asdict(config),
        "captions_sha256": _captions_sha256(config, captioned),
        "model": {"name": folder.name, "revision": folder.revision, **folder.fingerprint()},
    }
    try:
        path = prepare_output_dir(config.output)
    except InputError as error:
        raise InputError("output", error.problem) from error
    items = _items(config, captioned)
    with _held(path):
        output = _Output(path, about)
        todo = _not_done(items, output)
        if todo:
            encoders = encoders or load_encoders(config, folder)
            cut = sum(encoders.cut(entry.caption) for entry in captioned)
            versions = environment(device) | {"decoder": package_versions(("imageio-ffmpeg", "pyarrow"))}
            output.manifest["counts"] = {"videos": len(items), "captions_cut": cut}
            output.write_manifest(complete=False, environment=versions)
            if not (path / EMPTY_CAPTION).exists():
                write_empty_caption(path, encoders.text(""))
            with closing(_samples(config, items, todo, output, encoders, progress)) as samples:
                for first in samples:
                    output.write_shard(chain([first], islice(samples, config.rows_per_shard - 1)))
        if not output.manifest["complete"]:
            output.write_manifest(complete=True)
        if not output.ids:
            file, reason = next(iter(output.bad.items()))
            why = f"{path / 'quarantine.jsonl'} says why, and first: {file} {reason}"
            raise PreprocessError(f"no clip could be made of {len(items)} videos; {why}")
        counts: dict[str, int] = output.manifest["counts"]
        return counts


def _captions_sha256(config: PreprocessConfig, captioned: Sequence[Captioned]) -> str | None:
    if config.captions is not None:
        return file_sha256(config.captions)
    pairs = json.dumps([[entry.file, entry.caption] for entry in captioned])
    return hashlib.sha256(pairs.encode()).hexdigest() if captioned else None


def _not_done(items: Sequence[_Item], output: _Output) -> dict[str, int]:
    """The items still to be made, by their files, and how many of the clips of each are in shards already."""
    done = set(output.ids)
    last = output.ids[-1] if output.ids else None
    todo = {}
    for item in items:
        present = sum(name in done for name in item.ids)
        # A video may have fewer clips than asked for. More can only be missing of the one that the last shard ends in.
        whole = present == len(item.ids) or (present and last not in item.ids)
        if item.file not in output.bad and not whole:
            todo[item.file] = present
    return todo


def _samples(
    config: PreprocessConfig,
    items: Sequence[_Item],
    todo: Mapping[str, int],
    output: _Output,
    encoders: PipelineEncoders,
    progress: bool,
) -> Generator[Sample]:
    """The rows still to be written, in order; bad videos go to quarantine on the way."""
    cropped, cut = 0, output.manifest["counts"]["captions_cut"]
    bar = tqdm(total=len(items), initial=len(items) - len(todo), disable=not progress, unit="video")
    with bar, closing(_ahead((item for item in items if item.file in todo), config.workers)) as made:
        for item, future in made:
            # All clips of a video or none.
            samples: list[Sample] = []
            try:
                caption, clips = future.result()
                samples = _encode(config, item, todo[item.file], caption, clips, encoders)
                # Sizes are whole pixels: no more than that is lost of a picture that has the shape of the clips.
                cropped += clips[0].kept < 0.98
            except BadVideo as error:
                output.quarantine(item.file, str(error))
            bar.update()
            bar.set_postfix(bad=len(output.bad), cropped=cropped, captions_cut=cut, refresh=False)
            yield from samples


def _encode(
    config: PreprocessConfig, item: _Item, skip: int, caption: str, clips: Sequence[Clip], encoders: PipelineEncoders
) -> list[Sample]:
    """The rows of a video's clips but the first `skip`.

    Raises:
        BadVideo: what the encoders made is not finite.
    """
    samples = []
    store = getattr(torch, config.store_dtype)
    text = encoders.text(caption)
    for name, clip in list(zip(item.ids, clips, strict=False))[skip:]:
        video = clip.frames if clip.frames.is_floating_point() else clip.frames.float() / 127.5 - 1
        tensors = {"latents": encoders.latents(video)} | (encoders.image(video) if config.image_to_video else {})
        tensors = {key: tensor.to(store) for key, tensor in tensors.items()}
        if not all(tensor.isfinite().all() for tensor in (text, *tensors.values())):
            raise BadVideo("has encodings that are not finite")
        frames, height, width = video.shape[1:]
        samples.append(
            Sample(
                id=name,
                latents=tensors.pop("latents"),
                text=text,
                caption=caption,
                file_name=item.file,
                width=width,
                height=height,
                fps=clip.fps,
                duration=frames / clip.fps if clip.fps else 0.0,
                extras=tensors,
            )
        )
    return samples
