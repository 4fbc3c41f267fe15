"""Finding the folder of a pipeline, checking it before anything heavy is imported, and reading its components."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import InputError, file_sha256
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.pipelines.lora import in_words, listed
from vmonarch.pipelines.traits import TEXT_TO_VIDEO, TRAITS, Traits

if TYPE_CHECKING:
    import torch

    from vmonarch.grid import LatentGrid

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# A file in the folder of a proxy (`vmonarch.finetune.proxy`): how it was trained, and its recommended settings.
PROXY_RECORD = "proxy.json"
# Components that are models and must have weights; the others are tokenizers, schedulers and processors.
MODELS = ("transformer", "transformer_2", "vae", "text_encoder", "text_encoder_2", "image_encoder")
# Libraries whose classes components may be.
_LIBRARIES = ("diffusers", "transformers")
# Up to this size a record has hashes of a model's weights; above, of their sizes, because 60 GB would take minutes.
_HASHED_BYTES = 256 * 2**20
# Weights of other programs, which lie beside the components' folders, are left out.
_HUB_FILES = ["*.json", "*/*.safetensors", "*.txt", "*.model", "*.jinja"]


class ModelError(RuntimeError):
    """A model folder whose contents are missing, damaged or not supported."""


@dataclass(frozen=True)
class ModelFolder:
    """A checked pipeline on disk.

    Args:
        name: as the user gave it: `embedded`, a path or a hub id.
        path: the local folder.
        revision: commit of a hub model.
        pipeline: class name in `model_index.json`.
        components: library and class of each of the pipeline's parts, likewise.
        outline: the pipeline as far as it can be had at once: its transformers and its VAE are without weights, and its
            other models are missing.
        config: of its transformer, the first of two.
        spatial, temporal: how many pixels (frames) of the video one latent pixel (frame) stands for.
        patch: latent pixels per token along frames, height and width.
        layers: of a transformer.
        image_conditioned: the transformer takes an image and cannot do without.
        image_capable: it can take one.
        boundary: the noise level below which it has a second transformer; None if it has none.
    """

    name: str
    path: Path
    revision: str | None
    pipeline: str
    components: Mapping[str, tuple[str, str]]
    outline: Any
    config: Any
    spatial: int
    temporal: int
    patch: tuple[int, int, int]
    layers: int
    image_conditioned: bool
    image_capable: bool
    boundary: float | None

    @property
    def word(self) -> str:
        """A name that finds the model from any folder: `embedded`, a hub id, or its path."""
        return self.name if self.name == "embedded" or self.revision else str(self.path)

    @property
    def traits(self) -> Traits:
        """The traits of its pipeline's class."""
        return TRAITS[self.pipeline]

    @property
    def multiples(self) -> tuple[int, int]:
        """A video's height and width must be multiples of these; most of diffusers' pipelines demand 16."""
        return math.lcm(16, self.spatial * self.patch[1]), math.lcm(16, self.spatial * self.patch[2])

    def grid(self, num_frames: int, height: int, width: int) -> LatentGrid:
        """The transformer's tokens for a video of this size; pipelines fill up the last token of too few frames."""
        from vmonarch.grid import LatentGrid

        latents = (num_frames - 1) // self.temporal + 1, height // self.spatial, width // self.spatial
        return LatentGrid(*(-(-size // patch) for size, patch in zip(latents, self.patch, strict=True)))

    def read_model(self, name: str, dtype: torch.dtype) -> Any:
        """One of `MODELS` on the CPU, as `dtype`, with all its tensors from its weights.

        Raises:
            ModelError: it cannot be loaded, or its weights lack tensors or hold others.
        """
        folder, (library, cls) = self.path / name, self.components[name]
        options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True}
        with cannot_be_loaded(folder):
            known = getattr(importlib.import_module(library), cls)
            model, found = known.from_pretrained(folder, dtype=dtype, **options)
        # The libraries only warn, and missing tensors would be random. Tied weights are not among them.
        for keys, problem in (
            ("missing_keys", "lack {} of the tensors that {} has by its config.json"),
            ("unexpected_keys", "hold {} tensors that {} has no place for by its config.json"),
        ):
            if names := found[keys]:
                what = problem.format(len(names), cls)
                raise ModelError(f"{folder} cannot be used: its weights {what}: {listed(names)}")
        return model

    def fingerprint(self) -> dict[str, str]:
        """Hashes of all index and config files, and of the weights: of their contents if small, else of their sizes."""

        def digest(pattern: str, told: Callable[[Path], bytes]) -> str:
            found = sorted(path for path in self.path.rglob(pattern) if path.is_file())
            parts = (path.relative_to(self.path).as_posix().encode() + b"\0" + told(path) for path in found)
            return hashlib.sha256(b"".join(parts)).hexdigest()

        contents = lambda path: bytes.fromhex(file_sha256(path))
        size = lambda path: b"%d" % path.stat().st_size
        weights = contents if folder_bytes(self.path) <= _HASHED_BYTES else size
        return {"configs_sha256": digest("*.json", contents), "weights_sha256": digest("*.safetensors", weights)}


def folder_bytes(folder: Path) -> int:
    """Size of the model in a folder, all files but Python's."""
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".py", ".pyc"))
    return sum(file.stat().st_size for file in files)


def find_model(name: str, revision: str | None = None) -> ModelFolder:
    """Locate and check a model: `embedded`, a local folder, or a hub id (`owner/name`, downloaded when needed).

    Args:
        revision: branch, tag or commit of a hub model.

    Raises:
        InputError: `name` is none of these, or `revision` is given for one that is not the hub's.
        ModelError: the folder holds no complete, supported pipeline.
    """
    from vmonarch.families import diffusers_class, known_family, transformers_in

    path, revision = _locate(name, revision)
    index = read_json(path / "model_index.json")
    pipeline: Any = index.get("_class_name")
    # FastWan's checkpoints name a class of FastVideo, whose components are those of the stock pipeline.
    pipeline = TEXT_TO_VIDEO if pipeline == "WanDMDPipeline" else pipeline
    if pipeline not in TRAITS:
        raise ModelError(f"{path} holds a {pipeline}; supported: {', '.join(TRAITS)}")
    components = {
        key: (str(entry[0]), str(entry[1]))
        for key, entry in index.items()
        if isinstance(entry, list) and len(entry) == 2 and entry[0]
    }
    for required in ("transformer", "vae", "text_encoder", "tokenizer", "scheduler"):
        if required not in components and not (required == "transformer" and "transformer_2" in components):
            raise ModelError(f"{path / 'model_index.json'} names no {required}")
    for component, (library, _) in components.items():
        if library not in _LIBRARIES:
            problem = f"it is of {library}; supported: classes of {' and '.join(_LIBRARIES)}"
            raise ModelError(f"{path / component} cannot be loaded: {problem}")
        if not (path / component).is_dir():
            raise ModelError(f"{path} has no folder {component}/, which its model_index.json names")
        # The libraries' own errors name missing and damaged files.
        if component in MODELS and not any((path / component).glob("*.safetensors")):
            problem = "has no weights; safetensors files are supported, pickled ones are not"
            raise ModelError(f"{path / component} {problem}")
    outline = _outline(path, pipeline, components)
    transformer, *others = transformers_in(outline).values()
    if diffusers_class(transformer) is None:
        problem = f"of class {type(transformer).__name__}, no transformer of a {pipeline}"
        raise ModelError(f"{path / 'transformer'} cannot be used: {problem}")
    config, traits, size = transformer.config, TRAITS[pipeline], transformer.config.patch_size
    spatial, temporal = (int(getattr(outline, traits.factor.format(along))) for along in ("spatial", "temporal"))
    # Image-to-video models of Wan 2.1 and 2.2 A14B take mask and image latents as extra input channels.
    image_conditioned = traits.wan and config.in_channels > outline.vae.config.z_dim
    return ModelFolder(
        name=name,
        path=path,
        revision=revision,
        pipeline=pipeline,
        components=components,
        outline=outline,
        config=config,
        spatial=spatial,
        temporal=temporal,
        patch=(config.patch_size_t or 1, size, size) if isinstance(size, int) else tuple(size),
        layers=len(known_family(transformer).blocks_of(transformer)),
        image_conditioned=image_conditioned,
        # The 5B model blends the image into the first latent frame instead of taking more channels.
        image_capable=image_conditioned or bool(index.get("expand_timesteps")),
        boundary=index.get("boundary_ratio") if others else None,
    )


def _outline(path: Path, pipeline: str, components: Mapping[str, tuple[str, str]]) -> Any:
    """`outline` of a `ModelFolder`."""
    import diffusers
    import torch

    parts: dict[str, Any] = dict.fromkeys(name for name in MODELS if name in components)
    for name in ("transformer", "transformer_2", "vae"):
        if name in components:
            with cannot_be_loaded(path / name), torch.device("meta"):
                cls = getattr(diffusers, components[name][1])
                parts[name] = cls.from_config(cls.load_config(path / name, local_files_only=True))
    with cannot_be_loaded(path):
        return getattr(diffusers, pipeline).from_pretrained(path, local_files_only=True, **parts)


@contextlib.contextmanager
def cannot_be_loaded(folder: Path) -> Iterator[None]:
    """Turn any error of the block, in which the libraries load from a folder, into a `ModelError`."""
    try:
        yield
    except Exception as error:
        raise ModelError(f"{folder} cannot be loaded: {in_words(error)}") from error


def find_wan_model(name: str, revision: str | None = None) -> ModelFolder:
    """`find_model` for training, whose data and loss are the Wan family's.

    Raises:
        InputError: as there, or the pipeline is of another family.
        ModelError: as there.
    """
    folder = find_model(name, revision)
    if not folder.traits.wan:
        supported = ", ".join(pipeline for pipeline, traits in TRAITS.items() if traits.wan)
        problem = f"must be of the Wan family, as training data and trainer are ({supported})"
        raise InputError("model", f"{problem}; {name!r} is a {folder.pipeline}")
    return folder


def _locate(name: str, revision: str | None) -> tuple[Path, str | None]:
    """(folder, commit of a hub model)."""
    supported = "must be 'embedded', a folder of a pipeline or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    path = Path(name).expanduser()
    if name == "embedded" or (name.strip() and path.is_dir()):
        if revision is not None:
            raise InputError("revision", f"is for models of the hub, which {name!r} is not; got {revision!r}")
        try:
            return embedded_model_path() if name == "embedded" else path.resolve(), None
        except FileNotFoundError as error:
            raise ModelError(str(error)) from error
    if name.strip() and path.exists():
        raise InputError("model", f"{supported}; {name!r} is a file")
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise InputError("model", f"{supported}; there is no folder {name!r}")
    import huggingface_hub

    try:
        snapshot = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:
        problem = f"model {name!r} is neither a folder here nor could it be had from the hub: {in_words(error)}"
        raise ModelError(problem) from error
    return snapshot, snapshot.name


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a pipeline's folder.

    Raises:
        ModelError: there is no such file, or it holds no JSON object.
    """
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; is it the folder of a diffusers pipeline?") from error
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read as a JSON object: {error}") from error
