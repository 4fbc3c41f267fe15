"""The training loop of `vmonarch finetune`.

accelerate brings the processes, mixed precision, gradient accumulation and the trackers; how weights are spread over
GPUs (DDP, FSDP2) is the user's accelerate config. All that is random is a function of (seed, step, data rank), and the
position in the data is saved with the weights, so that a resumed run takes the same steps as one that was not ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, LoggerType, gather_object
from torch.distributed.fsdp import MixedPrecisionPolicy

from vmonarch.configs import InputError
from vmonarch.files import write_json
from vmonarch.finetune.checkpoints import CheckpointError, Checkpoints, random_state, set_random_state
from vmonarch.finetune.config import FinetuneConfig, OptimizerConfig
from vmonarch.finetune.data.loader import Batch, DataError, LatentLoader
from vmonarch.finetune.data.parquet import ParquetFolder
from vmonarch.finetune.data.schema import TEXT_LENGTH
from vmonarch.finetune.models import (
    Annealing,
    BeforeLora,
    Experts,
    compile_blocks,
    load_experts,
    model_facts,
    share_clips,
)
from vmonarch.finetune.objective import Draw, NoiseLevels, Objective, experts_of, generator_for
from vmonarch.pipelines.environment import environment, seconds
from vmonarch.pipelines.model_folder import ModelFolder, find_wan_model
from vmonarch.pipelines.outputs import prepare_output_dir

# What may change between a run and the one that resumes it; all else would make it another run. Model and data may have
# moved: what they are is compared instead. The number of steps may change where the learning rate does not follow it.
FREE = ("output_dir", "steps", "trackers", "log_every", "validation", "checkpoints", "data.workers", "data.validation",
        "data.path", "model", "revision", "attention.plan", "attention.adapter", "attention.label")  # fmt: skip
# That a process waits for the others, of which a launcher ends all when one dies.
WAITING = timedelta(hours=6)
# By how much the gradient of compiled blocks may differ from that of eager ones, relative to its norm: bfloat16 gives
# some hundredths, and blocks that are compiled wrongly a multiple.
GRADIENT_CHANGE = 0.2


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says at which step, and why."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that train.

    Processes of one sequence-parallel group share clips, noise and noise levels: they have one data rank.

    Args:
        rank, world: of all processes. data_rank, data_world: of the groups.
    """

    rank: int
    world: int
    data_rank: int
    data_world: int

    @property
    def group(self) -> int:
        """Processes that share a clip."""
        return self.world // self.data_world

    @property
    def speaks(self) -> bool:
        """Whether this is the first of those that share a clip."""
        return self.rank % self.group == 0


class Trainer:
    """A run: everything is loaded and restored when it is made, `run` trains.

    Raises:
        InputError, ModelError, DataError, CheckpointError: the settings, the model, the data or the checkpoint that is
            to be resumed cannot be used, or another run is using the output folder, which is held until `run` ends.

    Attributes:
        held_out: the clips of `data.validation`, or None.
    """

    def __init__(self, config: FinetuneConfig) -> None:
        # Before the model, which may have to be downloaded.
        _check_trackers(config.trackers)
        path = _from_anywhere(config.data.path)
        held_out = config.data.validation and _from_anywhere(config.data.validation)
        self.clips = _open_clips("data.path", path)
        self.held_out = None if held_out is None else _open_clips("data.validation", held_out)
        self.output = Path(config.output_dir).expanduser()
        self.folder: ModelFolder = find_wan_model(config.model, config.revision)
        # A checkpoint's record finds model and data from any folder.
        data = dataclasses.replace(config.data, path=path, validation=held_out)
        config = self.config = dataclasses.replace(config, model=self.folder.word, data=data)
        self.facts = model_facts(self.folder, config)
        self.accelerator = _accelerator(config, len(self.facts.names))
        number, world = self.accelerator.process_index, self.accelerator.num_processes
        size = config.sequence_parallel_size
        if world % size:
            raise InputError("sequence_parallel_size", f"must divide the number of processes, {world}, got {size}")
        self.ranks = Ranks(number, world, number // size, world // size)
        self.accumulation = config.accumulation(self.ranks.data_world)
        self.accelerator.gradient_accumulation_steps = self.accumulation
        self._check_engine()
        # Weights may be hashed and git asked for it: once, not at every checkpoint.
        self.about = {
            "config": config.to_dict(),
            "model": self.folder.fingerprint(),
            "environment": environment(self.accelerator.device),
        }
        levels = NoiseLevels(
            config.objective.sigma,
            config.objective.mean,
            config.objective.std,
            config.objective.flow_shift or self.facts.flow_shift,
        )
        self.objective = Objective(
            levels,
            experts_of(self.facts.names, self.facts.boundary),
            config.seed,
            self.facts.conditioning,
            config.objective.distillation,
        )
        self.loader = self._loader(self.clips, config.seed, config.micro_batch, training=True)
        prepare_output_dir(config.output_dir)
        with contextlib.ExitStack() as held:
            if self.ranks.rank == 0:
                held.enter_context(_hold(self.output))
            self.checkpoints = Checkpoints(
                self.output / "checkpoints",
                keep=config.checkpoints.keep,
                rank=self.ranks.rank,
                world_size=self.ranks.world,
                exchange=lambda value: gather_object([value]),
            )
            self._load()
            self.step = 0
            self._resume()
            self._held = held.pop_all()

    def _check_engine(self) -> None:
        kind = self.accelerator.distributed_type
        supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU, DistributedType.FSDP)
        if kind not in supported:
            raise InputError(
                "accelerate", f"must be configured for one process, DDP or FSDP; {kind.value} cannot be resumed exactly"
            )
        if kind is DistributedType.FSDP:
            if not self.accelerator.is_fsdp2:
                raise InputError("accelerate", "must be configured for FSDP version 2, got version 1")
            if self.config.ema or self.config.validation.videos_every:
                raise InputError("ema", "and validation.videos_every must be 0 with FSDP, which spreads the weights")
            if self.config.sequence_parallel_size > 1:
                raise InputError("sequence_parallel_size", "must be 1 with FSDP; configure accelerate for DDP")

    def _loader(self, folder: ParquetFolder, seed: int, batch_size: int, *, training: bool) -> LatentLoader:
        config = self.config.data
        return LatentLoader(
            folder,
            batch_size=batch_size,
            seed=seed,
            rank=self.ranks.data_rank,
            world_size=self.ranks.data_world,
            workers=config.workers if training else 0,
            mean=self.facts.mean,
            std=self.facts.std,
            text_length=TEXT_LENGTH,
            text_dim=self.facts.text_dim,
            caption_dropout=config.caption_dropout if training else 0.0,
            shuffle=training,
            bad_fraction=config.bad_fraction,
            # Processes that share clips find the same ones bad.
            quarantine=self.output / "quarantine.jsonl" if training and self.ranks.speaks else None,
        )

    def _load(self) -> None:
        config, accelerator = self.config, self.accelerator
        products = torch.bfloat16 if config.precision == "bf16" else torch.float32
        # FSDP wants the weights of a block to have one dtype.
        fsdp = accelerator.distributed_type is DistributedType.FSDP
        experts, teacher = load_experts(self.folder, self.facts, config, torch.float32 if fsdp else products)
        distils_lora = bool(config.objective.distillation and config.lora.rank)
        if self.ranks.group > 1:
            for shared in (experts, *(() if teacher is None else (teacher,))):
                share_clips(shared, self.ranks.group, accelerator.device, distils_lora or config.anneal > 0)
        self.annealing = Annealing(experts, config.anneal)
        trained = [parameter for parameter in experts.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained, config.optimizer, accelerator.device)
        # The parts are reached through this; training goes through what accelerate makes of it.
        self.experts: Experts = experts
        self.model, self.optimizer = accelerator.prepare(experts, optimizer)
        self.teacher: Experts | BeforeLora | None = BeforeLora(experts) if distils_lora else teacher
        if isinstance(self.teacher, Experts):
            self.teacher.to(accelerator.device, products)
        if config.compile:
            for compiled in filter(None, (experts, teacher)):
                compile_blocks(*compiled.parts.values())
        self.trained = {
            name: p for name, p in accelerator.unwrap_model(self.model).named_parameters() if p.requires_grad
        }
        self.average: dict[str, torch.Tensor] = {}
        if config.ema:
            self.average = {name: parameter.detach().clone() for name, parameter in self.trained.items()}

    def save(self) -> Path:
        """Commit a checkpoint of this step."""
        weights, optimizer = self._states()
        shared = {
            "model": weights,
            "optimizer": optimizer,
            "run": {"step": self.step, **self.about},
        }
        if self.average:
            shared["ema"] = self.average
        own = {"loader": self.loader.state_dict(), "random": random_state(self.accelerator.device)}
        return self.checkpoints.save(self.step, shared, own)

    def _states(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Trained weights by name, and the optimizer's state, whole on rank 0."""
        if self.accelerator.distributed_type is not DistributedType.FSDP:
            return {name: p.detach() for name, p in self.trained.items()}, self.optimizer.optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=options)
        return weights, optimizer

    def _resume(self) -> None:
        how = self.config.checkpoints
        folder = self.output / "checkpoints"
        if how.resume == "never" and (newest := self.checkpoints.latest()) is not None:
            raise InputError("checkpoints.resume", f"is never, but there is {newest}; give another output_dir")
        wanted = ["model", "optimizer", "run", "loader", "random"] + (["ema"] if self.average else [])
        found = self.checkpoints.load_latest(wanted=wanted, waive=how.waive)
        if found is None:
            if how.resume == "must":
                raise InputError("checkpoints.resume", f"is must, but {folder} holds no checkpoint")
            return
        newest, parts = found
        self._check_same_run(newest, parts["run"])
        self._restore(newest, parts)
        self.step = parts["run"]["step"]

    def _check_same_run(self, path: Path, run: Mapping[str, Any]) -> None:
        if run["model"] != self.about["model"]:
            raise CheckpointError(f"{path} was trained from another model than {self.folder.name}")
        before, now = _flat(run["config"]), _flat(self.about["config"])
        free = [name for name in FREE if name != "steps" or self.config.optimizer.schedule == "constant"]
        # An average that may be missing may begin now.
        free += [name for name in self.config.checkpoints.waive if name == "ema"]
        different = sorted(
            key
            for key in before.keys() | now.keys()
            if before.get(key) != now.get(key) and not any(key == name or key.startswith(f"{name}.") for name in free)
        )
        if different:
            listed = ", ".join(f"{key} ({before.get(key)!r}, now {now.get(key)!r})" for key in different)
            raise CheckpointError(f"{path} cannot be resumed with other settings: {listed}; give another output_dir")

    def _restore(self, path: Path, parts: Mapping[str, Any]) -> None:
        weights = parts["model"]
        missing, unexpected = self.trained.keys() - weights.keys(), weights.keys() - self.trained.keys()
        if missing or unexpected:
            raise CheckpointError(
                f"{path} does not fit: missing {sorted(missing)[:3]}, unexpected {sorted(unexpected)[:3]}"
            )
        if self.accelerator.distributed_type is DistributedType.FSDP:
            from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

            options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
            set_state_dict(
                self.model,
                self.optimizer.optimizer,
                model_state_dict=weights,
                optim_state_dict=parts.get("optimizer", {}),
                options=options,
            )
        else:
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(weights[name])
            if "optimizer" in parts:
                self.optimizer.optimizer.load_state_dict(parts["optimizer"])
        with torch.no_grad():
            for name, tensor in self.average.items():
                tensor.copy_(parts.get("ema", self.trained)[name])
        if "loader" in parts:
            self.loader.load_state_dict(parts["loader"])
        if "random" in parts:
            set_random_state(parts["random"], self.accelerator.device)

    def run(self) -> dict[str, Any]:
        """Train to the last step; returns what the log's last lines say.

        Raises:
            TrainingError: a loss or gradient is not finite, or compiled blocks are wrong; no weight was changed by it.
        """
        with self._held:
            return self._run()

    def _run(self) -> dict[str, Any]:
        config = self.config
        if config.compile:
            self._check_compiled()
        self._record()
        last: dict[str, Any] = {"step": self.step}
        with self._trackers(), contextlib.closing(iter(self.loader)) as batches:
            clock = _Clock(self.accelerator.device, config.batch_size)
            if self.step == 0 and config.validation.every:
                last |= self._log({"validation_loss": self.validate()})
            while self.step < config.steps:
                values = self._update(batches)
                self.step += 1
                clock.tick()
                done = self.step == config.steps
                if self.step % config.log_every == 0 or done:
                    last |= self._log({**values, **clock.read(config.steps - self.step)})
                if config.validation.every and (self.step % config.validation.every == 0 or done):
                    last |= self._log({"validation_loss": self.validate()})
                    clock.pause()
                if config.validation.videos_every and (self.step % config.validation.videos_every == 0 or done):
                    self.sample()
                    clock.pause()
                if self.step % config.checkpoints.every == 0 or done:
                    self.save()
                    clock.pause()
        return last

    def _check_compiled(self) -> None:
        """Compare the gradients of a clip by compiled and by eager blocks.

        Raises:
            TrainingError: they differ.
        """
        self.annealing.at(self.config.anneal)
        loader = self._loader(self.clips, 0, 1, training=False)
        batch = next(iter(loader))
        latents = batch.latents.to(self.accelerator.device)
        for expert in self.objective.experts:
            plain = dataclasses.replace(self.objective, experts=(expert,), distillation=0.0)
            draw = plain.draw(latents, step=0)
            found: list[list[torch.Tensor | None]] = []
            for stance in ("force_eager", "default"):
                with torch.compiler.set_stance(stance):
                    self.accelerator.backward(self._losses(plain, draw, batch, latents).mean())
                parameters = list(self.model.parameters())
                found.append([None if p.grad is None else _own_part(p.grad).cpu() for p in parameters])
                for parameter in parameters:
                    parameter.grad = None
            pairs = [(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None]
            sums = torch.tensor([[(a - b).square().sum(), a.square().sum()] for a, b in pairs]).sum(0)
            change = self.accelerator.reduce(sums.to(self.accelerator.device), "sum").cpu()
            if not change[0].sqrt() <= GRADIENT_CHANGE * change[1].sqrt():
                raise TrainingError(
                    f"the gradient of compiled blocks differs from that of eager ones by"
                    f" {(change[0] / change[1]).sqrt():.2g} of its norm, where at most {GRADIENT_CHANGE} is right; use"
                    f" compile=false with torch {torch.__version__}"
                )

    def _update(self, batches: Iterator[Batch]) -> dict[str, float]:
        config, accelerator = self.config, self.accelerator
        rate = config.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        dense = self.annealing.at(self.step)
        losses: list[torch.Tensor] = []
        seen: list[Batch] = []
        norm = torch.zeros(())
        for micro in range(self.accumulation):
            batch = next(batches)
            latents = batch.latents.to(accelerator.device)
            draw = self.objective.draw(latents, step=self.step, micro=micro, data_rank=self.ranks.data_rank)
            with accelerator.accumulate(self.model):
                loss = self._losses(self.objective, draw, batch, latents)
                # DDP takes the mean over all processes; those that share a clip have parts of its gradient.
                accelerator.backward(self.ranks.group * loss.mean())
                losses.append(loss.detach())
                seen.append(batch)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(list(self.trained.values()), config.optimizer.clip)
                    # FSDP gives each rank its part.
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    self._stop_unless_finite(losses, seen, norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        if self.average:
            # As many steps as there were are enough for the average of the first ones.
            decay = min(config.ema, (1 + self.step) / (10 + self.step))
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    self.average[name].lerp_(parameter, 1 - decay)
        mean = accelerator.reduce(torch.cat(losses).mean(), "mean").item()
        return {"loss": mean, "gradient_norm": float(norm), "learning_rate": rate, "dense_layers": dense}

    def _losses(self, objective: Objective, draw: Draw, batch: Batch, latents: torch.Tensor) -> torch.Tensor:
        device = self.accelerator.device
        tokens = math.prod(s // p for s, p in zip(latents.shape[2:], objective.conditioning.patch, strict=True))
        if tokens % self.ranks.group:
            size = self.ranks.group
            raise InputError("sequence_parallel_size", f"must divide the {tokens} tokens of a clip, got {size}")
        extras = {name: tensor.to(device) for name, tensor in batch.extras.items()}
        name = draw.expert.name
        teacher = None if self.teacher is None else partial(self.teacher, name)
        with self.accelerator.autocast():
            return objective.losses(partial(self.model, name), draw, latents, batch.text.to(device), extras, teacher)

    def _stop_unless_finite(self, losses: list[torch.Tensor], seen: list[Batch], norm: torch.Tensor) -> None:
        """End the run on all ranks, before the weights change, if anything is not finite on any of them."""
        finite = torch.stack([x.isfinite().all() for x in losses]).all() & norm.to(losses[0].device).isfinite()
        if self.accelerator.reduce((~finite).float(), "sum").item() == 0:
            return
        bad = [
            batch.ids[i]
            for batch, loss in zip(seen, losses, strict=True)
            for i in (~loss.isfinite()).nonzero().flatten()
        ]
        of_all = gather_object([{"rank": self.ranks.rank, "clips": bad or [i for b in seen for i in b.ids]}])
        named = "; ".join(f"rank {entry['rank']}: {', '.join(entry['clips'][:8])}" for entry in of_all)
        raise TrainingError(
            f"step {self.step}: the loss or the gradient is not finite (gradient norm {float(norm):.3g});"
            f" no weight was changed. Clips of this step: {named}"
        )

    @torch.no_grad()
    def validate(self) -> float | None:
        """Mean loss of the held-out clips at fixed noise levels with fixed noise; None without held-out clips."""
        config = self.config
        if self.held_out is None:
            return None
        clips = min(config.validation.clips, len(self.held_out))
        loader = self._loader(self.held_out, 0, 1, training=False)
        levels, J = self.objective.levels, config.validation.levels
        # Of one of two experts, its own levels: it may serve none of all.
        low, high = min(e.low for e in self.objective.experts), max(e.high for e in self.objective.experts)
        sigmas = levels.levels((torch.arange(J, dtype=torch.float64) + 0.5) / J, low, high)
        total = torch.zeros(2, dtype=torch.float64)
        plain = dataclasses.replace(self.objective, distillation=0.0)
        self.model.eval()
        with self._exported_weights():
            for number, batch in enumerate(loader):
                if number * self.ranks.data_world >= clips:
                    break
                # Every rank takes as many clips, which FSDP needs; those beyond the last do not count.
                clip = number * self.ranks.data_world + self.ranks.data_rank
                counts = clip < clips
                latents = batch.latents.to(self.accelerator.device)
                for j, sigma in enumerate(sigmas):
                    expert = next(e for e in plain.experts if e.low <= sigma <= e.high)
                    # By the clip and not by its rank: the noise is the same on any number of processes.
                    random = generator_for(0, "validation", clip, j)
                    noise = torch.randn(latents.shape, generator=random).to(latents)
                    conditioned = torch.full((1,), plain.conditioning.kind == "channels", device=latents.device)
                    draw = Draw(expert, sigma.to(latents).expand(1), noise, conditioned)
                    loss = self._losses(plain, draw, batch, latents).item()
                    if counts:
                        total += torch.tensor([loss, 1.0], dtype=torch.float64)
        self.model.train()
        total = self.accelerator.reduce(total.to(self.accelerator.device, torch.float32), "sum")
        return (total[0] / total[1]).item()

    @contextlib.contextmanager
    def _exported_weights(self) -> Iterator[None]:
        """Let the model have the averaged weights, if there are any, which are what is exported."""
        kept = {name: self.trained[name].detach().clone() for name in self.average}
        with torch.no_grad():
            for name, tensor in self.average.items():
                self.trained[name].copy_(tensor)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in kept.items():
                    self.trained[name].copy_(tensor)

    def sample(self) -> list[Path]:
        """Make the validation videos on the first rank; the others wait."""
        made: list[Path] = []
        if self.accelerator.is_main_process:
            from vmonarch.finetune.videos import write_videos

            self.model.eval()
            with self._exported_weights(), self.accelerator.autocast():
                made = write_videos(self.folder, self.experts, self.config, self.output / "videos", self.step)
            self.model.train()
            self._show(made)
        self.accelerator.wait_for_everyone()
        return made

    def _show(self, videos: list[Path]) -> None:
        """Put the contact sheets of videos into the trackers that take pictures."""
        import numpy as np
        from PIL import Image

        for tracker in self.accelerator.trackers:
            if not hasattr(tracker, "log_images"):
                continue
            for video in videos:
                sheet = np.asarray(Image.open(video.with_suffix(".png")).convert("RGB"))
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                tracker.log_images({video.stem: sheet[None]}, step=self.step, **layout)

    def _record(self) -> None:
        """Write what is run, and on what, beside what comes of it: one file for each time that the run goes on."""
        if not self.accelerator.is_main_process:
            return
        record = {
            "from_step": self.step,
            "processes": self.ranks.world,
            "engine": self.accelerator.distributed_type.value,
            "parameters": sum(parameter.numel() for parameter in self.trained.values()),
            **self.about,
        }
        write_json(self.output / f"run-{self.step:08d}.json", record)

    @contextlib.contextmanager
    def _trackers(self) -> Iterator[None]:
        names = self.config.trackers
        if names:
            self.accelerator.init_trackers(
                "vmonarch", config={k: str(v) for k, v in _flat(self.config.to_dict()).items()}
            )
        try:
            yield
        finally:
            if names:
                self.accelerator.end_training()

    def _log(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write values of this step to the log, the trackers and the terminal."""
        known = {name: value for name, value in values.items() if value is not None}
        if known and self.accelerator.is_main_process:
            line = {"step": self.step, **known}
            with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print("  ".join(_shown(name, value) for name, value in line.items()), flush=True)
        if known and self.config.trackers:
            self.accelerator.log(known, step=self.step)
        return known


def _check_trackers(names: Sequence[str]) -> None:
    known, installed = LoggerType.list(), [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in known:
            raise InputError("trackers", f"must be of {', '.join(known)}, got {name!r}")
        if name not in (*installed, "all"):
            raise InputError("trackers", f"names {name}, which is not installed; installed: {', '.join(installed)}")


def _from_anywhere(path: str) -> str:
    """The path as it is known in every folder."""
    return str(Path(path).expanduser().resolve())


def _open_clips(name: str, path: str) -> ParquetFolder:
    try:
        return ParquetFolder(path)
    except (DataError, OSError) as error:
        raise InputError(
            name, f"must be a folder of parquet files, as `vmonarch preprocess` makes them: {error}"
        ) from error


def _hold(folder: Path) -> IO[str]:
    """Hold a run's folder against other runs until what is returned is closed, or the process ends.

    Raises:
        InputError: another run holds it.
    """
    # Network file systems lock files that are open for writing, and no folders.
    file = (folder / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InputError(
            "output_dir", f"{str(folder)!r} is in use by another run; wait for its end or give another"
        ) from error
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked ({error.strerror}): start no second run in it", stacklevel=2)
    # A loader's workers outlive a killed run for a moment, in which it may be started anew.
    register_after_fork(file, lambda inherited: inherited.close())
    return file


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], options: OptimizerConfig, device: torch.device
) -> torch.optim.Optimizer:
    """AdamW. On GPUs it is fused: the other forms hold a copy of all weights during an update."""
    return torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda",
    )


def _accelerator(config: FinetuneConfig, experts: int) -> Accelerator:
    # The others wait while the first process samples videos or writes a checkpoint.
    handlers: list[Any] = [InitProcessGroupKwargs(timeout=WAITING)]
    if experts > 1:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=True))
    accelerator = Accelerator(
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        log_with=list(config.trackers) or None,
        project_dir=Path(config.output_dir).expanduser(),
        kwargs_handlers=handlers,
    )
    if accelerator.is_fsdp2 and config.precision == "bf16":
        # accelerate would have gradients added in bfloat16. Inputs stay as they are: the rotary embedding is float32,
        # and a block that checkpointing computes again gets it without this cast.
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    return accelerator


def _own_part(gradient: Any) -> torch.Tensor:
    """Of a gradient that FSDP spreads over ranks, what is on this one."""
    part: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


class _Clock:
    """Seconds of a step, clips a second, what is left, and peak memory; validation and saving do not count."""

    def __init__(self, device: torch.device, clips: int) -> None:
        self._device, self._clips = device, clips
        self.pause()

    def tick(self) -> None:
        self._steps += 1

    def pause(self) -> None:
        """Begin to count anew."""
        self._steps, self._started = 0, time.monotonic()

    def read(self, left: int) -> dict[str, float]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if not self._steps:
            return {}
        seconds = (time.monotonic() - self._started) / self._steps
        values = {"seconds": seconds, "clips_per_second": self._clips / seconds, "seconds_left": left * seconds}
        if self._device.type == "cuda":
            values["peak_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        self.pause()
        return values


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _shown(name: str, value: Any) -> str:
    if name == "seconds_left":
        return f"left {seconds(value)}"
    return f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
