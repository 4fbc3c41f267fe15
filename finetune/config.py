"""What a finetune run is made of: typed settings, merged from YAML files and `key=value` overrides."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from vmonarch.configs import InputError, build, check_keys, deep_merge
from vmonarch.configs.methods import AttentionMethod, merge_attention, resolve_method
from vmonarch.finetune.objective import DISTRIBUTIONS

SCHEDULES = ("constant", "cosine", "linear")
PRECISIONS = ("bf16", "fp32")
TRAIN = ("all", "transformer", "transformer_2")
RESUME = ("auto", "never", "must")
# Parts of a checkpoint that a run can start anew.
WAIVABLE = ("optimizer", "ema", "loader", "random")
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class DataConfig:
    """Clips as rows of parquet (`vmonarch preprocess` or FastVideo make them).

    Args:
        path: folder or file. validation: the same, of clips that are never trained on; null for no validation loss.
        workers: processes of each rank that read ahead.
        caption_dropout: share of the clips that are trained on without their caption, in [0, 1].
        bad_fraction: share of rows that may be unusable; above it the run ends with an error.
    """

    path: str = ""
    validation: str | None = None
    workers: int = 2
    caption_dropout: float = 0.1
    bad_fraction: float = 0.01


@dataclass(frozen=True)
class ObjectiveConfig:
    """Flow matching; see `vmonarch.finetune.objective`.

    Args:
        sigma: logit_normal or uniform, with mean and std of the normal.
        flow_shift: null for that of the model's scheduler.
        image_share: share of the clips whose first frame is given, for models that can do both (Wan2.2 5B).
        distillation: share of the loss that is the distance to the velocity of the model with full attention as it was
            at the start, of which a copy is kept, but with LoRA; the rest is the distance to that of the clips.
    """

    sigma: str = "logit_normal"
    mean: float = 0.0
    std: float = 1.0
    flow_shift: float | None = None
    image_share: float = 0.0
    distillation: float = 0.0


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning rate.

    Args:
        learning_rate: after the warm-up of so many steps; `schedule` leads it down to `final` times that.
        clip: largest norm of all gradients together.
    """

    learning_rate: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    schedule: str = "constant"
    warmup: int = 0
    final: float = 0.0


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank layers in place of the full weights; rank 0 for the full weights.

    Args:
        alpha: null for the rank. targets: endings of the names of the layers.
    """

    rank: int = 0
    alpha: float | None = None
    targets: tuple[str, ...] = LORA_TARGETS


@dataclass(frozen=True)
class ValidationConfig:
    """What is measured while training, always with the same noise.

    Args:
        every: steps; 0 for never. clips, levels: of the loss: so many clips at so many noise levels.
        prompts: of videos that are sampled every `videos_every` steps, with so many sampling steps (null: the model's).
    """

    every: int = 100
    clips: int = 16
    levels: int = 8
    prompts: tuple[str, ...] = ()
    videos_every: int = 0
    steps: int | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints to resume from.

    Args:
        every: steps. keep: how many.
        resume: auto (the newest, if there is one), never (an error if there is one), must (an error if there is none).
        waive: parts of WAIVABLE that may be missing, with which the run starts anew.
    """

    every: int = 250
    keep: int = 2
    resume: str = "auto"
    waive: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinetuneConfig:
    """A run.

    Args:
        model: `embedded`, the folder of a Wan pipeline, or a hub id. revision: of a hub model.
        attention: a method as `vmonarch generate` takes it.
        train: all transformers of the pipeline, or one of Wan2.2's two.
        steps: updates of the weights.
        batch_size: clips of an update, over all processes. micro_batch: clips of a process, or of those that share a
            clip, at a time.
        anneal: steps over which the layers go from full attention to `attention`, the last ones first.
        ema: decay of an average of the weights that is exported in their place; 0 for none.
        precision: of the products; weights, gradients and optimizer are float32.
        gradient_checkpointing: compute activations twice to store few.
        compile: let torch compile the transformers' blocks; a first gradient is compared with that of eager ones.
        sequence_parallel_size: processes that share a clip, each with some of its tokens (diffusers' context
            parallelism); 1 for none.
        trackers: names that accelerate knows (tensorboard, wandb, …); (): none.
        log_every: steps.
    """

    output_dir: str = "outputs/finetune"
    model: str = "embedded"
    revision: str | None = None
    attention: Any = "vmonarch"
    train: str = "all"
    steps: int = 1500
    batch_size: int = 8
    micro_batch: int = 1
    seed: int = 0
    anneal: int = 0
    ema: float = 0.0
    precision: str = "bf16"
    gradient_checkpointing: bool = True
    compile: bool = False
    sequence_parallel_size: int = 1
    trackers: tuple[str, ...] = ("tensorboard",)
    log_every: int = 10
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.attention, AttentionMethod):
            object.__setattr__(self, "attention", resolve_method(self.attention))
        for name, choices in (
            ("train", TRAIN),
            ("precision", PRECISIONS),
            ("objective.sigma", DISTRIBUTIONS),
            ("optimizer.schedule", SCHEDULES),
            ("checkpoints.resume", RESUME),
        ):
            if (value := attrgetter(name)(self)) not in choices:
                raise InputError(name, f"must be one of {', '.join(choices)}, got {value!r}")
        for name in ("steps", "batch_size", "micro_batch", "sequence_parallel_size", "log_every", "validation.clips",
                     "validation.levels", "checkpoints.every", "checkpoints.keep"):  # fmt: skip
            self._check(name, 1, math.inf)
        self._check("seed", 0, 2**63 - 1)
        self._check("objective.mean", -math.inf, math.inf)
        for name in ("anneal", "data.workers", "optimizer.warmup", "lora.rank", "validation.every",
                     "validation.videos_every", "optimizer.weight_decay"):  # fmt: skip
            self._check(name, 0, math.inf)
        for name in ("data.caption_dropout", "data.bad_fraction", "objective.image_share", "objective.distillation",
                     "optimizer.final"):  # fmt: skip
            self._check(name, 0, 1)
        if self.sequence_parallel_size > 1 and self.validation.videos_every:
            raise InputError("validation.videos_every", "must be 0 with sequence_parallel_size, which spreads clips")
        for name in ("ema", "optimizer.beta1", "optimizer.beta2"):
            self._check(name, 0, 1, below=True)
        for name in ("optimizer.learning_rate", "optimizer.eps", "optimizer.clip", "objective.std",
                     "objective.flow_shift", "lora.alpha"):  # fmt: skip
            self._check(name, 0, math.inf, above=True)
        self._check("validation.steps", 1, math.inf)
        if not self.data.path:
            raise InputError("data.path", "is missing: a folder of parquet files, as `vmonarch preprocess` makes them")
        for part in self.checkpoints.waive:
            if part not in WAIVABLE:
                raise InputError("checkpoints.waive", f"must be of {', '.join(WAIVABLE)}, got {part!r}")
        if self.lora.rank and not self.lora.targets:
            raise InputError("lora.targets", "must name at least one layer")
        if self.validation.videos_every and not self.validation.prompts:
            raise InputError("validation.prompts", "must hold a prompt if validation.videos_every is above 0")

    def _check(self, name: str, low: float, high: float, *, above: bool = False, below: bool = False) -> None:
        value = attrgetter(name)(self)
        if value is None:
            return
        if not math.isfinite(value):
            raise InputError(name, f"must be finite, got {value}")
        if value < low or value > high or (above and value == low) or (below and value == high):
            ends = [f"{'above' if above else 'at least'} {low}"]
            if math.isfinite(high):
                ends.append(f"{'below' if below else 'at most'} {high}")
            raise InputError(name, f"must be {' and '.join(ends)}, got {value}")

    def accumulation(self, processes: int) -> int:
        """Micro-batches of a process in an update; processes that share a clip count as one.

        Raises:
            InputError: batch_size is no multiple of micro_batch times the processes.
        """
        at_once = self.micro_batch * processes
        if self.batch_size % at_once:
            raise InputError(
                "batch_size",
                f"must be a multiple of micro_batch × processes = {self.micro_batch} × {processes},"
                f" got {self.batch_size}",
            )
        return self.batch_size // at_once

    def learning_rate(self, step: int) -> float:
        """Of the update number `step`, from 0."""
        options = self.optimizer
        if step < options.warmup:
            return options.learning_rate * (step + 1) / options.warmup
        if options.schedule == "constant":
            return options.learning_rate
        progress = min(1.0, (step - options.warmup) / max(1, self.steps - options.warmup))
        down = (1 + math.cos(math.pi * progress)) / 2 if options.schedule == "cosine" else 1 - progress
        return options.learning_rate * (options.final + (1 - options.final) * down)

    def to_dict(self) -> dict[str, Any]:
        """Every setting as plain values; `finetune_config` reads them back."""
        return _plain_values({**vars(self), "attention": self.attention.to_dict()})


def _plain_values(value: Any) -> Any:
    """Values as JSON has them."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _plain_values(entry) for key, entry in value.items()}
    return [_plain_values(entry) for entry in value] if isinstance(value, list | tuple) else value


_GROUPS: dict[str, Any] = {
    f.name: f.default_factory
    for f in dataclasses.fields(FinetuneConfig)
    if f.default_factory is not dataclasses.MISSING
}
# The fields of a run that are no groups, for OmegaConf to check their types.
_Plain: Any = dataclasses.make_dataclass(
    "_Plain",
    [
        (f.name, typing.get_type_hints(FinetuneConfig)[f.name], dataclasses.field(default=f.default))
        for f in dataclasses.fields(FinetuneConfig)
        if f.name not in _GROUPS and f.name != "attention"
    ],
    frozen=True,
)


def finetune_config(*layers: Mapping[str, Any]) -> FinetuneConfig:
    """A config from layers of plain values (YAML, overrides), later ones over earlier ones.

    Raises:
        InputError: an unknown key, or a value of another type or out of range; the error names the key.
    """
    values: dict[str, Any] = {"attention": "vmonarch"}
    for layer in layers:
        check_keys(FinetuneConfig, layer)
        attention = merge_attention(values["attention"], layer.get("attention", values["attention"]))
        values = {**deep_merge(values, layer), "attention": attention}
    parts = {}
    for name, schema in _GROUPS.items():
        given = values.pop(name, {})
        if not isinstance(given, Mapping):
            raise InputError(name, f"must be a mapping of keys to values, got {given!r}")
        parts[name] = build(schema, given, prefix=f"{name}.")
    parts["attention"] = values.pop("attention")
    plain = build(_Plain, values)
    return FinetuneConfig(**vars(plain), **parts)
