"""Settings of a finetune run, typed and merged from YAML files and `key=value` overrides."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from vmonarch.configs import InputError, Settings, choice, number
from vmonarch.configs.methods import resolve_method


def require(fits: object, argument: str, problem: str) -> None:
    """Raise `InputError(argument, problem)` unless something fits."""
    if not fits:
        raise InputError(argument, problem)


@dataclass(frozen=True)
class DataConfig(Settings):
    """Clips as rows of parquet (`vmonarch preprocess` or FastVideo make them).

    Args:
        path: their folder. validation: the same, of clips that are never trained on; null for no validation loss.
        caption_dropout: share of the clips that are trained on without their caption, in [0, 1].
    """

    path: str = ""
    validation: str | None = None
    caption_dropout: float = number(0.1, "[0, 1]")


@dataclass(frozen=True)
class ObjectiveConfig(Settings):
    """Flow matching; see `vmonarch.finetune.objective`.

    Args:
        sigma: logit_normal or uniform, with mean and std of the normal.
        flow_shift: null for that of the model's scheduler.
        image_share: share of the clips whose first frame is given, for models that can do both (Wan2.2 5B).
        distillation: share of the loss that is the distance to the velocity of the model with full attention as it was
            at the start, of which a copy is kept, but with LoRA; the rest is the distance to that of the clips.
    """

    sigma: str = choice("logit_normal", "logit_normal", "uniform")
    mean: float = number(0.0)
    std: float = number(1.0, "(0, inf)")
    flow_shift: float | None = number(None, "(0, inf)")
    image_share: float = number(0.0, "[0, 1]")
    distillation: float = number(0.0, "[0, 1]")


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """AdamW and its learning rate.

    Args:
        learning_rate: the rate after `warmup` steps; with the schedule `cosine` it falls to 0 at the last step.
        transfer_learning_rate: the rate in the steps of `transfer`.
        clip: largest norm of all gradients together.
    """

    learning_rate: float = number(1e-6, "(0, inf)")
    transfer_learning_rate: float = number(1e-2, "(0, inf)")
    beta1: float = number(0.9, "[0, 1)")
    beta2: float = number(0.999, "[0, 1)")
    eps: float = number(1e-8, "(0, inf)")
    weight_decay: float = number(0.01, "[0, inf)")
    clip: float = number(1.0, "(0, inf)")
    schedule: str = choice("constant", "constant", "cosine")
    warmup: int = number(0, "[0, inf)")


@dataclass(frozen=True)
class LoraConfig(Settings):
    """Low-rank layers in place of the full weights; rank 0 for the full weights.

    Args:
        alpha: null for the rank. targets: endings of the names of the layers.
    """

    rank: int = number(0, "[0, inf)")
    alpha: float | None = number(None, "(0, inf)")
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True)
class ValidationConfig(Settings):
    """Measurements while training, always with the same noise.

    Args:
        every: steps; 0 for never. clips, levels: numbers of clips and of noise levels in the loss.
        prompts: of videos that are sampled every `videos_every` steps.
    """

    every: int = number(100, "[0, inf)")
    clips: int = number(16, "[1, inf)")
    levels: int = number(8, "[1, inf)")
    prompts: tuple[str, ...] = ()
    videos_every: int = number(0, "[0, inf)")


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """Checkpoints to resume from.

    Args:
        every: steps. keep: how many.
        any_processes: another number of processes may go on, with other clips in each step.
    """

    every: int = number(250, "[1, inf)")
    keep: int = number(2, "[1, inf)")
    any_processes: bool = False


@dataclass(frozen=True)
class FinetuneConfig(Settings):
    """A run.

    Args:
        model: `embedded`, the folder of a Wan pipeline, or a hub id. revision: of a hub model.
        attention: a method as `vmonarch generate` takes it.
        train: all transformers of the pipeline, or one of Wan2.2's two.
        steps: updates of the weights.
        batch_size: clips of an update, over all processes. micro_batch: clips of a process, or of those that share a
            clip, at a time; they have one size.
        transfer: first steps, in which every layer of an attention that learns is fitted by itself to what full
            attention gives for the same input; nothing else learns then.
        ema: decay of an average of the weights that is exported in their place; 0 for none.
        precision: of the products; weights, gradients and optimizer are float32.
        gradient_checkpointing: compute activations twice to store few.
        compile: let torch compile the transformers' blocks.
        sequence_parallel_size: processes that share a clip, each with some of its tokens (diffusers' context
            parallelism); 1 for none.
        trackers: names that accelerate knows (tensorboard, wandb, …); (): none.
        log_every: steps.
    """

    output_dir: str = "outputs/finetune"
    model: str = "embedded"
    revision: str | None = None
    attention: Any = "vmonarch"
    train: str = choice("all", "all", "transformer", "transformer_2")
    steps: int = number(1500, "[1, inf)")
    batch_size: int = number(8, "[1, inf)")
    micro_batch: int = number(1, "[1, inf)")
    seed: int = number(0, "[0, 9223372036854775808)")
    transfer: int = number(0, "[0, inf)")
    ema: float = number(0.0, "[0, 1)")
    precision: str = choice("bf16", "bf16", "fp32")
    gradient_checkpointing: bool = True
    compile: bool = False
    sequence_parallel_size: int = number(1, "[1, inf)")
    trackers: tuple[str, ...] = ("tensorboard",)
    log_every: int = number(10, "[1, inf)")
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "attention", resolve_method(self.attention))
        refresh = self.attention.options.get("refresh")
        require(refresh is None, "attention.refresh", f"must be null, as residuals have no gradient, got {refresh}")
        require(
            self.data.path, "data.path", "is missing: a folder of parquet files, as `vmonarch preprocess` makes them"
        )
        require(self.lora.targets or not self.lora.rank, "lora.targets", "must name at least one layer")
        if self.validation.videos_every:
            whole = self.sequence_parallel_size == 1
            require(whole, "validation.videos_every", "must be 0 with sequence_parallel_size, which spreads clips")
            prompts = self.validation.prompts
            require(prompts, "validation.prompts", "must hold a prompt if validation.videos_every is above 0")

    def learning_rate(self, step: int) -> float:
        """Learning rate of update number `step`, from 0."""
        options = self.optimizer
        if step < self.transfer:
            return options.transfer_learning_rate
        step -= self.transfer
        if step < options.warmup:
            return options.learning_rate * (step + 1) / options.warmup
        if options.schedule == "constant":
            return options.learning_rate
        progress = min(1.0, (step - options.warmup) / max(1, self.steps - self.transfer - options.warmup))
        return options.learning_rate * (1 + math.cos(math.pi * progress)) / 2
