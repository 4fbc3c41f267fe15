"""The training loop of `vmonarch finetune`.

accelerate brings the processes, mixed precision, gradient accumulation and the trackers; how weights are spread over
GPUs (DDP, FSDP2) is the user's accelerate config. All randomness, and the position in the data, is a function of
(seed, step, data rank), so that a resumed run takes the same steps as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, gather_object, send_to_device
from diffusers.training_utils import EMAModel
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from vmonarch.configs import InputError
from vmonarch.files import prepare_output_dir
from vmonarch.finetune import checkpoints
from vmonarch.finetune.checkpoints import CheckpointError
from vmonarch.finetune.config import FinetuneConfig, OptimizerConfig, require
from vmonarch.finetune.data.loader import Batch, LatentLoader
from vmonarch.finetune.data.parquet import DataError, ParquetFolder
from vmonarch.finetune.models import (
    Experts,
    compile_blocks,
    layers_of,
    load_experts,
    objective_of,
    share_clips,
)
from vmonarch.finetune.objective import Draw, generator_for
from vmonarch.pipelines.config import SamplingConfig, complete
from vmonarch.pipelines.environment import environment
from vmonarch.pipelines.loading import LoadedModel, read_pipeline
from vmonarch.pipelines.model_folder import find_wan_model
from vmonarch.pipelines.outputs import changes
from vmonarch.pipelines.sampling import sample
from vmonarch.pipelines.video_io import encode_video, to_uint8

# Settings that may change when a run is resumed; any other change makes it another run. Model and data may have moved:
# their contents are compared instead. The number of steps may change if the learning rate does not depend on it.
FREE = ("output_dir", "trackers", "log_every", "validation", "checkpoints", "data.validation", "data.path",
         "model", "revision", "attention.label")  # fmt: skip
# accelerate would have gradients added in bfloat16. Inputs stay as they are: the rotary embedding is float32, and a
# block that checkpointing computes again gets it without this cast.
FSDP_PRECISION = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


class TrainingError(RuntimeError):
    """The run cannot go on; the message says at which step, and why."""


class Trainer:
    """A run: making it loads and restores everything, `run` trains.

    Raises:
        InputError, ModelError, DataError, CheckpointError: settings, model, data or the checkpoint to resume cannot be
            used, or another run is using the output folder, which this run locks until `run` ends.

    Attributes:
        held_out: reads the clips of `data.validation`; None if there are none.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        # Checked before the model, which may have to be downloaded.
        known = ["all", *map(str, get_available_trackers())]
        for name in config.trackers:
            require(name in known, "trackers", f"must be of {', '.join(known)}, which are installed, got {name}")
        clips = _open_clips("data.path", config.data.path)
        held_out = _open_clips("data.validation", config.data.validation) if config.data.validation else None
        self.output = Path(config.output_dir).expanduser()
        self.folder = find_wan_model(config.model, config.revision)
        # A checkpoint's record finds model and data from any folder.
        validation = str(held_out.path) if held_out else None
        data = dataclasses.replace(config.data, path=str(clips.path), validation=validation)
        config = self.config = dataclasses.replace(config, model=self.folder.word, data=data)
        self.objective = objective_of(self.folder, config)
        self.accelerator = _accelerator(config, len(self.objective.experts))
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        # Processes that share clips, noise and noise levels have one data rank.
        self.group = config.sequence_parallel_size
        problem = f"must divide the number of processes, {self.world}, got {self.group}"
        require(self.world % self.group == 0, "sequence_parallel_size", problem)
        self.data_rank, self.data_world = self.rank // self.group, self.world // self.group
        self.accumulation, rest = divmod(config.batch_size, config.micro_batch * self.data_world)
        product = f"micro_batch × processes = {config.micro_batch} × {self.data_world}"
        require(rest == 0, "batch_size", f"must be a multiple of {product}, got {config.batch_size}")
        self.accelerator.gradient_accumulation_steps = self.accumulation
        # FSDP would hold whole gradients of all weights between micro-batches, as many bytes as one process needs.
        self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = self.accelerator.is_fsdp2
        # This may hash weights and run git: once, not at every checkpoint.
        self.about: dict[str, Any] = {
            "config": config.to_dict(),
            "model": self.folder.fingerprint(),
            "data": clips.fingerprint(),
            "environment": environment(self.accelerator.device),
        }
        vae = self.folder.outline.vae.config
        self.loader = LatentLoader(
            clips,
            batch_size=config.micro_batch,
            seed=config.seed,
            rank=self.data_rank,
            world_size=self.data_world,
            mean=torch.tensor(vae.latents_mean),
            std=torch.tensor(vae.latents_std),
            text_dim=self.folder.config.text_dim,
            caption_dropout=data.caption_dropout,
        )
        self.held_out = dataclasses.replace(self.loader, folder=held_out) if held_out else None
        self.step, self.saved = 0, self.output / "checkpoints"
        self._shown: dict[str, str] = {}
        prepare_output_dir(config.output_dir)
        with contextlib.ExitStack() as held:
            if self.rank == 0:
                held.enter_context(checkpoints.hold(self.output, "output_dir"))
            self._load()
            self._resume()
            self._held = held.pop_all()

    def _load(self) -> None:
        config, accelerator = self.config, self.accelerator
        products = torch.bfloat16 if config.precision == "bf16" else torch.float32
        # FSDP wants the weights of a block to have one dtype.
        frozen = torch.float32 if accelerator.distributed_type.value == "FSDP" else products
        experts, teacher = load_experts(self.folder, self.objective.experts, config, frozen)
        loaded = [model for model in (experts, teacher) if isinstance(model, Experts)]
        if self.group > 1:
            for shared in loaded:
                share_clips(shared, self.group, accelerator.device)
        learns = any(ours.spec.LEARNS for model in experts.parts.values() for _, ours, _ in layers_of(model))
        require(learns or not config.transfer, "transfer", "must be 0 with an attention that has no parameters")
        trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained, config.optimizer, accelerator.device)
        if config.compile:
            for compiled in loaded:
                compile_blocks(*compiled.parts.values())
        # The parts are reached through this; training calls the module that accelerate makes of it.
        self.experts: Experts = experts
        self.model, self.optimizer = accelerator.prepare(experts, optimizer)
        self.teacher = teacher
        if isinstance(teacher, Experts):
            teacher.to(accelerator.device, products)
        self.trained = {n: p for n, p in accelerator.unwrap_model(self.model).named_parameters() if p.requires_grad}
        self.average = EMAModel(self.trained.values(), decay=config.ema) if config.ema else None
        for parameter in self.trained.values():
            # AdamW would make the state in its first step, but a checkpoint must be able to fill it before.
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    # Checkpoints

    def save(self) -> Path:
        """Commit a checkpoint of this step."""
        return checkpoints.save(self.saved, self.step, self._tensors(), self.about, keep=self.config.checkpoints.keep)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, by name: weights, AdamW's state of each, and their average."""
        found = {}
        for name, parameter in self.trained.items():
            found[checkpoints.WEIGHTS + name] = parameter.detach()
            found |= {f"{kind}.{name}": tensor for kind, tensor in self.optimizer.state[parameter].items()}
        if self.average is not None:
            names = (checkpoints.AVERAGE + name for name in self.trained)
            found |= zip(names, self.average.shadow_params, strict=True)
        return found

    def _resume(self) -> None:
        """Restore the newest checkpoint, if there is one and it is of this run."""
        path = checkpoints.newest(self.saved)
        if path is None:
            return
        run = checkpoints.read(path)
        anew = run["world_size"] != self.world
        if anew and not self.config.checkpoints.any_processes:
            raise CheckpointError(
                f"{path} was saved by {run['world_size']} processes, there are {self.world};"
                " checkpoints.any_processes=true lets these go on, with other clips in each step"
            )
        if run["model"] != self.about["model"]:
            raise CheckpointError(f"{path} was trained from another model than {self.folder.name}")
        if run["data"] != self.about["data"] and not anew:
            raise CheckpointError(f"{path} was trained from other clips than those in {self.config.data.path}")
        free = (*FREE, "steps") if self.config.optimizer.schedule == "constant" else FREE
        if changed := "; ".join(changes(run["config"], self.about["config"], free)):
            raise CheckpointError(f"{path} cannot be resumed with other settings: {changed}; give another output_dir")
        checkpoints.read_tensors(path, self._tensors())
        if self.average is not None:
            self.average.optimization_step = run["step"]
        self.step = run["step"]

    # Training

    def run(self) -> None:
        """Train to the last step.

        Raises:
            TrainingError: a loss or gradient is not finite; no weight was changed by it.
        """
        config, accelerator = self.config, self.accelerator
        validates = 0 if self.held_out is None else config.validation.every
        at = lambda every: every > 0 and (self.step % every == 0 or self.step == config.steps)
        with contextlib.ExitStack() as held:
            held.enter_context(self._held)
            if config.trackers:
                accelerator.init_trackers("vmonarch", {k: str(v) for k, v in self.about["config"].items()})
                held.callback(accelerator.end_training)
            # In a file, one line every half minute.
            every = 0.1 if sys.stderr.isatty() else 30.0
            shown = {"mininterval": every, "maxinterval": every, "dynamic_ncols": True, "disable": self.rank > 0}
            bar = held.enter_context(tqdm(total=config.steps, initial=self.step, unit="step", **shown))
            batches = held.enter_context(contextlib.closing(self.loader.batches(self.step * self.accumulation)))
            if self.step == 0 and validates:
                self._log({"validation_loss": self.validate()}, bar)
            seconds: list[float] = []
            while self.step < config.steps:
                began = time.monotonic()
                values = self._update(batches)
                seconds.append(time.monotonic() - began)
                self.step += 1
                bar.update()
                if at(config.log_every):
                    mean = sum(seconds) / len(seconds)
                    values |= {"seconds": mean, "clips_per_second": config.batch_size / mean}
                    seconds.clear()
                    if accelerator.device.type == "cuda":
                        values["peak_memory_gb"] = torch.cuda.max_memory_allocated(accelerator.device) / 1e9
                    self._log(values, bar)
                if at(validates):
                    self._log({"validation_loss": self.validate()}, bar)
                if at(config.validation.videos_every):
                    self.sample()
                if at(config.checkpoints.every):
                    self.save()

    def _update(self, batches: Iterator[Batch]) -> dict[str, float]:
        config, accelerator = self.config, self.accelerator
        rate, transfer = config.learning_rate(self.step), self.step < config.transfer
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses: list[torch.Tensor] = []
        seen: list[Batch] = []
        for micro in range(self.accumulation):
            batch = send_to_device(next(batches), accelerator.device)
            draw = self.objective.draw(batch.latents, step=self.step, micro=micro, data_rank=self.data_rank)
            with accelerator.accumulate(self.model):
                loss = self._losses(draw, batch, transfer=transfer)
                # DDP takes the mean over all processes; those that share a clip have parts of its gradient.
                accelerator.backward(self.group * loss.mean())
            losses.append(loss.detach())
            seen.append(batch)
        for name, parameter in self.trained.items():
            if transfer and ".processor." not in name:
                # The optimizer updates the attention's own parameters alone.
                parameter.grad = None
        norm = accelerator.clip_grad_norm_(list(self.trained.values()), config.optimizer.clip)
        # FSDP gives each rank its part.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._stop_unless_finite(losses, seen, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.step(self.trained.values())
        mean = accelerator.reduce(torch.cat(losses).mean(), "mean").item()
        return {"loss": mean, "gradient_norm": float(norm), "learning_rate": rate}

    def _losses(self, draw: Draw, batch: Batch, *, transfer: bool = False, plain: bool = False) -> torch.Tensor:
        """[B]: the loss of each clip; the distance to the clips alone with `plain`."""
        objective, model = self.objective, partial(self.model, draw.expert.name)
        tokens = math.prod(s // p for s, p in zip(batch.latents.shape[2:], objective.patch, strict=True))
        problem = f"must divide the {tokens} tokens of a clip, got {self.group}"
        require(tokens % self.group == 0, "sequence_parallel_size", problem)
        with self.accelerator.autocast():
            if transfer:
                given, _ = objective.inputs(draw, batch.latents, batch.text, batch.extras)
                return model(transfer=True, **given)
            teacher = None if plain or self.teacher is None else partial(self.teacher, draw.expert.name)
            return objective.losses(model, draw, batch.latents, batch.text, batch.extras, teacher)

    def _stop_unless_finite(self, losses: list[torch.Tensor], seen: list[Batch], norm: torch.Tensor) -> None:
        """End the run on all ranks, before the weights change, if anything is not finite on any of them."""
        finite = torch.cat([loss.isfinite() for loss in losses]).tolist()
        wrong = not all(finite) or not norm.isfinite()
        if self.accelerator.reduce(torch.tensor(float(wrong), device=self.accelerator.device), "sum").item() == 0:
            return
        clips = [clip for batch in seen for clip in batch.ids]
        bad = [clip for clip, fine in zip(clips, finite, strict=True) if not fine]
        of_all = gather_object([f"rank {self.rank}: {', '.join((bad or clips)[:8])}"])
        raise TrainingError(
            f"step {self.step}: the loss or the gradient is not finite (gradient norm {float(norm):.3g});"
            f" no weight was changed. Clips of this step: {'; '.join(of_all)}"
        )

    # Measurements and videos

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss of the held-out clips at fixed noise levels with fixed noise."""
        assert self.held_out is not None
        rows, J = len(self.held_out.folder), self.config.validation.levels
        clips = min(self.config.validation.clips, rows)
        objective = self.objective
        # If only one of two experts is trained, its own levels: it may serve none of the others.
        low, high = min(e.low for e in objective.experts), max(e.high for e in objective.experts)
        sigmas = objective.levels((torch.arange(J, dtype=torch.float64) + 0.5) / J, low, high)
        losses: list[float] = []
        with self._exported_weights():
            for first in range(0, clips, self.data_world):
                # Every rank takes as many clips, which FSDP needs; those beyond the last do not count.
                clip = first + self.data_rank
                counts = clip < clips
                batch = send_to_device(self.held_out.batch([(clip % rows, False)]), self.accelerator.device)
                latents = batch.latents
                for j, sigma in enumerate(sigmas):
                    # Seeded by the clip, not by the rank: the noise is the same on any number of processes.
                    random = generator_for(0, "validation", clip, j)
                    noise = torch.randn(latents.shape, generator=random).to(latents)
                    conditioned = torch.zeros(1, dtype=torch.bool, device=latents.device)
                    draw = Draw(objective.expert(sigma), sigma.to(latents).expand(1), noise, conditioned)
                    loss = self._losses(draw, batch, plain=True).item()
                    if counts:
                        losses.append(loss)
        losses = gather_object(losses)
        return sum(losses) / len(losses)

    @contextlib.contextmanager
    def _exported_weights(self) -> Iterator[None]:
        """Put the model into evaluation mode with the weights to be exported: the averaged ones, if there are any."""
        self.model.eval()
        if self.average is not None:
            self.average.store(self.trained.values())
            self.average.copy_to(self.trained.values())
        try:
            yield
        finally:
            if self.average is not None:
                self.average.restore(self.trained.values())
            self.model.train()

    def sample(self) -> None:
        """Make a video of each validation prompt on the first rank (seed 0); the others wait."""
        if self.rank == 0:
            config, device = self.config, self.accelerator.device
            wanted = SamplingConfig(config.validation.prompts, model=config.model, revision=config.revision)
            settings = complete(wanted, self.folder)
            # Parts that are not trained are read for the video and then dropped.
            kind, parts = getattr(diffusers, self.folder.pipeline), dict(self.experts.parts.items())
            pipe = read_pipeline(kind, self.folder, torch.float32, **parts).to(device)
            model = LoadedModel(pipe, self.folder, device, torch.float32, settings)
            videos = self.output / "videos"
            videos.mkdir(parents=True, exist_ok=True)
            for number, prompt in enumerate(settings.prompts):
                with self._exported_weights(), self.accelerator.autocast():
                    frames = to_uint8(sample(model, settings, [prompt], [0]).frames[0])
                # This replaces the video of a run that ended before its next checkpoint.
                encode_video(videos / f"step-{self.step:08d}-{number:02d}.mp4", frames, settings.fps or 16.0)
        self.accelerator.wait_for_everyone()

    def _log(self, values: dict[str, float], bar: Any) -> None:
        """Write values of this step to the log, the trackers and the bar."""
        if self.rank == 0:
            with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **values}) + "\n")
            self._shown |= {name: f"{values[name]:.4g}" for name in ("loss", "validation_loss") if name in values}
            bar.set_postfix(self._shown, refresh=False)
        self.accelerator.log(values, step=self.step)


def _accelerator(config: FinetuneConfig, experts: int) -> Accelerator:
    # The others wait while the first process samples videos or writes a checkpoint. If one dies, the launcher ends all.
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=timedelta(hours=6))]
    if experts > 1 or config.transfer:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(config.trackers) or None,
        project_dir=Path(config.output_dir).expanduser(),
        kwargs_handlers=handlers,
    )
    used, supported = accelerator.distributed_type.value, ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP")
    problem = f"must be configured for one process, DDP or FSDP; {used} cannot be resumed exactly"
    require(used in supported, "accelerate", problem)
    if used == "FSDP":
        require(accelerator.is_fsdp2, "accelerate", "must be configured for FSDP version 2, got version 1")
        why = "with FSDP, which spreads the weights; configure accelerate for DDP"
        for name, only in {"ema": 0, "transfer": 0}.items():
            require(getattr(config, name) == only, name, f"must be {only} {why}")
        require(not config.validation.videos_every, "validation.videos_every", f"must be 0 {why}")
        if config.precision == "bf16":
            accelerator.state.fsdp_plugin.mixed_precision_policy = FSDP_PRECISION
    return accelerator


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], options: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW, fused on GPUs: its other forms hold a copy of all weights during an update."""
    return torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda",
    )


def _open_clips(name: str, path: str) -> ParquetFolder:
    try:
        return ParquetFolder(Path(path).expanduser().resolve())
    except (DataError, OSError) as error:
        problem = f"must be a folder of parquet files, as `vmonarch preprocess` makes them: {error}"
        raise InputError(name, problem) from error
