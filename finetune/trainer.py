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
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import IO, Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, LoggerType, gather_object
from diffusers.training_utils import EMAModel
from safetensors.torch import save_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from tqdm import tqdm

from vmonarch.configs import InputError
from vmonarch.files import write_json
from vmonarch.finetune.checkpoints import (
    AVERAGE,
    FORMAT,
    WEIGHTS,
    CheckpointError,
    Checkpoints,
    load_weights,
    read_manifest,
    read_run,
)
from vmonarch.finetune.config import FinetuneConfig, OptimizerConfig
from vmonarch.finetune.data.loader import Batch, DataError, LatentLoader
from vmonarch.finetune.data.parquet import TEXT_LENGTH, ParquetFolder
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
from vmonarch.pipelines.environment import environment
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
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        # Processes that share clips, noise and noise levels have one data rank.
        self.group = config.sequence_parallel_size
        if self.world % self.group:
            raise InputError(
                "sequence_parallel_size", f"must divide the number of processes, {self.world}, got {self.group}"
            )
        self.data_rank, self.data_world = self.rank // self.group, self.world // self.group
        self.accumulation = config.accumulation(self.data_world)
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
            if self.rank == 0:
                held.enter_context(_hold(self.output))
            self.checkpoints = Checkpoints(
                self.output / "checkpoints",
                keep=config.checkpoints.keep,
                rank=self.rank,
                world_size=self.world,
                exchange=lambda value: gather_object([value]),
            )
            self._load()
            self.step = 0
            self._shown: dict[str, str] = {}
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
            if self.config.ema or self.config.validation.videos_every or self.config.transfer:
                more = "so must validation.videos_every and transfer"
                raise InputError("ema", f"must be 0 with FSDP, which spreads the weights; {more}")
            if self.group > 1:
                raise InputError("sequence_parallel_size", "must be 1 with FSDP; configure accelerate for DDP")
            # Of a full one, the first process would have to hold all.
            self.accelerator.state.fsdp_plugin.set_state_dict_type("SHARDED_STATE_DICT")

    def _loader(self, folder: ParquetFolder, seed: int, batch_size: int, *, training: bool) -> LatentLoader:
        config = self.config.data
        return LatentLoader(
            folder,
            batch_size=batch_size,
            seed=seed,
            rank=self.data_rank,
            world_size=self.data_world,
            workers=config.workers if training else 0,
            mean=self.facts.mean,
            std=self.facts.std,
            text_length=TEXT_LENGTH,
            text_dim=self.facts.text_dim,
            caption_dropout=config.caption_dropout if training else 0.0,
            shuffle=training,
            bad_fraction=config.bad_fraction,
            # Processes that share clips find the same ones bad.
            quarantine=self.output / "quarantine.jsonl" if training and self.rank % self.group == 0 else None,
        )

    def _load(self) -> None:
        config, accelerator = self.config, self.accelerator
        products = torch.bfloat16 if config.precision == "bf16" else torch.float32
        # FSDP wants the weights of a block to have one dtype.
        fsdp = accelerator.distributed_type is DistributedType.FSDP
        experts, teacher = load_experts(self.folder, self.facts, config, torch.float32 if fsdp else products)
        distils_lora = bool(config.objective.distillation and config.lora.rank)
        if self.group > 1:
            for shared in (experts, *(() if teacher is None else (teacher,))):
                share_clips(shared, self.group, accelerator.device, distils_lora or config.anneal > 0)
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
        self.average = EMAModel(self.trained.values(), decay=config.ema) if config.ema else None
        # Weights are read and written by name: accelerate knows them by how they are wrapped.
        accelerator.register_save_state_pre_hook(self._write_weights)
        accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
        learns = any(".processor." in name for name in self.trained)
        if config.transfer and not learns:
            raise InputError("transfer", "must be 0 with an attention that has no parameters")

    def save(self) -> Path:
        """Commit a checkpoint of this step."""
        run = {"step": self.step, "loader": self.loader.state_dict(), **self.about}
        return self.checkpoints.save(self.step, lambda folder: self.accelerator.save_state(str(folder)), run)

    def _write_weights(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Put the trained weights in place of all, and write their average; FSDP has written its own."""
        if weights:
            weights[:] = [{name: parameter.detach() for name, parameter in self.trained.items()}]
        if self.average is not None and self.rank == 0:
            save_file(dict(zip(self.trained, self.average.shadow_params, strict=True)), Path(folder) / AVERAGE)

    def _resume(self) -> None:
        how = self.config.checkpoints
        if how.resume == "never" and (newest := self.checkpoints.latest()) is not None:
            raise InputError("checkpoints.resume", f"is never, but there is {newest}; give another output_dir")
        path = self.checkpoints.latest_sound()
        if path is None:
            if how.resume == "must":
                raise InputError("checkpoints.resume", f"is must, but {self.checkpoints.folder} holds no checkpoint")
            return
        manifest, run = read_manifest(path), read_run(path)
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} is of a version before 2026-11-28, which alone can resume it; to go on from its weights,"
                f" `vmonarch export {self.output} --output …`, and finetune what it writes in another output_dir"
            )
        spread = self.accelerator.distributed_type is DistributedType.FSDP
        if spread == (WEIGHTS in manifest["files"]):
            raise CheckpointError(f"{path} was saved {'without' if spread else 'with'} FSDP; go on with it as it began")
        missing = [] if self.average is None or AVERAGE in manifest["files"] else ["ema"]
        missing += ["loader", "random"] if manifest["world_size"] != self.world else []
        if unwaived := [part for part in missing if part not in how.waive]:
            raise CheckpointError(
                f"{path} lacks {', '.join(unwaived)} (saved by {manifest['world_size']} processes, there are"
                f" {self.world}); checkpoints.waive names what may begin anew"
            )
        self._check_same_run(path, run)
        self._restore(path, missing)
        if "loader" not in missing:
            self.loader.load_state_dict(run["loader"])
        self.step = run["step"]

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

    def _restore(self, path: Path, missing: Sequence[str]) -> None:
        random = torch.get_rng_state()
        self.accelerator.load_state(str(path))
        if "random" in missing:
            torch.set_rng_state(random)
        if self.accelerator.distributed_type is not DistributedType.FSDP:
            load_weights(path / WEIGHTS, self.trained)
        if self.average is not None:
            shadow = dict(zip(self.trained, self.average.shadow_params, strict=True))
            if "ema" in missing:
                torch._foreach_copy_(list(shadow.values()), [p.detach() for p in self.trained.values()])
            else:
                load_weights(path / AVERAGE, shadow)
                self.average.optimization_step = read_run(path)["step"]

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
        at = lambda every: every and (self.step % every == 0 or self.step == config.steps)
        with self._trackers(), self._bar() as bar, contextlib.closing(iter(self.loader)) as batches:
            clock = _Clock(self.accelerator.device, config.batch_size)
            if self.step == 0 and config.validation.every:
                last |= self._log({"validation_loss": self.validate()}, bar)
            while self.step < config.steps:
                values = self._update(batches)
                self.step += 1
                clock.steps += 1
                bar.update()
                if at(config.log_every):
                    last |= self._log({**values, **clock.read()}, bar)
                if at(config.validation.every):
                    last |= self._log({"validation_loss": self.validate()}, bar)
                if at(config.validation.videos_every):
                    self.sample()
                if at(config.checkpoints.every):
                    self.save()
                if any(map(at, (config.validation.every, config.validation.videos_every, config.checkpoints.every))):
                    clock.begin()
        return last

    def _bar(self) -> Any:
        """One line on stderr: steps, steps a second, what is left, and the last losses."""
        every = 0.1 if sys.stderr.isatty() else 30.0
        done = {"total": self.config.steps, "initial": self.step, "disable": not self.accelerator.is_main_process}
        return tqdm(**done, unit="step", mininterval=every, maxinterval=every, dynamic_ncols=True)

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
            draw = self.objective.draw(latents, step=self.step, micro=micro, data_rank=self.data_rank)
            with accelerator.accumulate(self.model):
                loss = self._losses(self.objective, draw, batch, latents, transfer=self.step < config.transfer)
                # DDP takes the mean over all processes; those that share a clip have parts of its gradient.
                accelerator.backward(self.group * loss.mean())
                losses.append(loss.detach())
                seen.append(batch)
                if self.step < config.transfer:
                    self._forget_gradients_of_others()
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(list(self.trained.values()), config.optimizer.clip)
                    # FSDP gives each rank its part.
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    self._stop_unless_finite(losses, seen, norm)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.step(self.trained.values())
        mean = accelerator.reduce(torch.cat(losses).mean(), "mean").item()
        return {"loss": mean, "gradient_norm": float(norm), "learning_rate": rate, "dense_layers": dense}

    def _losses(
        self, objective: Objective, draw: Draw, batch: Batch, latents: torch.Tensor, *, transfer: bool = False
    ) -> torch.Tensor:
        device = self.accelerator.device
        tokens = math.prod(s // p for s, p in zip(latents.shape[2:], objective.conditioning.patch, strict=True))
        if tokens % self.group:
            size = self.group
            raise InputError("sequence_parallel_size", f"must divide the {tokens} tokens of a clip, got {size}")
        extras = {name: tensor.to(device) for name, tensor in batch.extras.items()}
        text, name = batch.text.to(device), draw.expert.name
        with self.accelerator.autocast():
            if transfer:
                given, _ = objective.inputs(draw, latents, text, extras)
                return self.model(name, transfer=True, **given)
            teacher = None if self.teacher is None else partial(self.teacher, name)
            return objective.losses(partial(self.model, name), draw, latents, text, extras, teacher)

    def _forget_gradients_of_others(self) -> None:
        """Leave the optimizer nothing but what the attention itself learns."""
        for name, parameter in self.trained.items():
            if ".processor." not in name:
                parameter.grad = None

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
        of_all = gather_object([{"rank": self.rank, "clips": bad or [i for b in seen for i in b.ids]}])
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
                if number * self.data_world >= clips:
                    break
                # Every rank takes as many clips, which FSDP needs; those beyond the last do not count.
                clip = number * self.data_world + self.data_rank
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
        if self.average is None:
            yield
            return
        # Stored on the device: `EMAModel.store` goes through the CPU.
        kept = [parameter.detach().clone() for parameter in self.trained.values()]
        self.average.copy_to(self.trained.values())
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self.trained.values(), kept, strict=True):
                    parameter.copy_(before)

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
            "processes": self.world,
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

    def _log(self, values: Mapping[str, Any], bar: Any) -> dict[str, Any]:
        """Write values of this step to the log, the trackers and the bar."""
        known = {name: value for name, value in values.items() if value is not None}
        if known and self.accelerator.is_main_process:
            with (self.output / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self.step, **known}) + "\n")
            self._shown |= {name: f"{known[name]:.4g}" for name in ("loss", "validation_loss") if name in known}
            bar.set_postfix(self._shown, refresh=False)
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
    if experts > 1 or config.transfer:
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
    """Seconds of a step, clips a second and peak memory; what is between `read` and `begin` is left out."""

    def __init__(self, device: torch.device, clips: int) -> None:
        self._device, self._clips = device, clips
        self.begin()

    def begin(self) -> None:
        self.steps, self._started = 0, time.monotonic()

    def read(self) -> dict[str, float]:
        """What was measured since the last `begin`, which this is, too."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = (time.monotonic() - self._started) / self.steps
        values = {"seconds": seconds, "clips_per_second": self._clips / seconds}
        if self._device.type == "cuda":
            values["peak_memory_gb"] = torch.cuda.max_memory_allocated(self._device) / 1e9
        self.begin()
        return values


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
