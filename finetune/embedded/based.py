"""Train the adapter with which the embedded model runs Based, and write it with `vmonarch.save_adapter`.

    python -m vmonarch.finetune.embedded.based --output based.safetensors --time-limit 340

Two stages. Transfer: with the model's exact attention at work, the parameters of every layer's Based learn to give what
the exact attention of that layer gives for the same input. Finetune: with Based at work, its parameters and LoRA layers
learn flow matching and the velocity of the model with exact attention. The log (JSON, beside the file) has the losses
and the error of the velocity before, between and after.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vmonarch.based import BasedLayer, BasedProcessor, frame_decay
from vmonarch.files import write_json
from vmonarch.finetune.embedded import loop
from vmonarch.finetune.embedded.text import TEXT_LENGTH, encode_text, tokenize
from vmonarch.finetune.embedded.transformer import (
    TrainingAttention,
    draw_clips,
    encode_clips,
    project,
    velocity,
)
from vmonarch.finetune.models import compile_blocks
from vmonarch.finetune.scenes import sample_scenes, write_captions
from vmonarch.grid import LatentGrid
from vmonarch.kernels.window.neighbours import neighbours

# What the package has room for.
MAX_BYTES = 2 * 2**20
# Noise levels at which velocities are compared.
SIGMAS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"]


@dataclass(frozen=True)
class BasedSettings:
    """Sizes of a run.

    Args:
        rank: of the LoRA layers in all attention and feed-forward layers; 0 for none.
        distillation: share of the loss that is the error against the exact model's velocity; the rest is flow matching.
    """

    layers: str = "both"
    feature_dim: int = 16
    window: tuple[int, int, int] = (3, 5, 5)
    decay: bool = False
    rank: int = 24
    clips: int = 16_000
    captions_per_clip: int = 4
    batch: int = 64
    transfer_steps: int = 600
    steps: int = 6000
    transfer_learning_rate: float = 1e-2
    learning_rate: float = 1e-3
    distillation: float = 0.9
    sigma_shift: float = 3.0
    validation_clips: int = 32
    seed: int = 0


class DenseBased(torch.nn.Module):
    """Computes what a `BasedLayer` computes, with all weights written out: fast for few tokens with gradients.

    Args:
        layer: a linear, window or both layer with the Taylor map; its parameters are the ones that learn.
        mask: the neighbourhood, [S, S].
    """

    def __init__(self, layer: BasedLayer, mask: torch.Tensor, frames: int) -> None:
        super().__init__()
        self.layer = layer
        self.frames = frames
        self.register_buffer("mask", mask, persistent=False)

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As an attention processor: [B, S, C] -> [B, S, C]."""
        query, key, value = project(attn, hidden_states, hidden_states, rotary_emb)
        # Scores in 16 bits would be off by more than the difference that is to be learnt.
        with torch.autocast(query.device.type, enabled=False):
            wide = torch.promote_types(query.dtype, torch.float32)
            out = self.attend(*(x.to(wide).transpose(1, 2) for x in (query, key, value)))
        return attn.to_out[0](out.transpose(1, 2).flatten(2, 3).to(value.dtype))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query, key and value [B, H, S, D] -> [B, H, S, D]."""
        kind, linear, mask = self.layer.kind, self.layer.linear, self.mask
        weights = torch.zeros((), dtype=query.dtype, device=query.device)
        most = weights
        if kind != "linear":
            scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)  # type: ignore[operator]
            # Never below 0, so that the linear part, which has no such shift of its own, cannot overflow.
            most = scores.detach().amax(-1, keepdim=True).clamp(min=0)
            weights = torch.exp(scores - most)
        if linear is not None:
            features = (x @ w.to(x.dtype).mT for x, w in ((query, linear.query_weight), (key, linear.key_weight)))
            s = next(features) @ next(features).mT * linear.query_weight.shape[1] ** -0.5
            global_weights = (1 + s + s * s / 2) * torch.exp(-most)
            if linear.log_rate is not None:
                decay = frame_decay(linear.log_rate, self.frames).to(s.dtype)
                per_frame = s.shape[-1] // self.frames
                global_weights = global_weights * decay.repeat_interleave(per_frame, 1).repeat_interleave(per_frame, 2)
            if linear.log_weight is not None:
                global_weights = global_weights * linear.log_weight.to(s.dtype).exp()[:, None, None]
            weights = weights + global_weights
        return (weights @ value) / weights.sum(-1, keepdim=True)


class Transfer(torch.nn.Module):
    """Computes exact attention, and meanwhile how far a layer of Based is from it on the same input.

    Args:
        student: the Based processor, or a `DenseBased`.
    """

    loss: torch.Tensor

    def __init__(self, student: torch.nn.Module) -> None:
        super().__init__()
        self.student = student
        self.exact = TrainingAttention(0)

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: None = None,
        attention_mask: None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """As an attention processor: [B, S, C] -> [B, S, C]; sets `loss`, relative to the variance of the output."""
        with torch.no_grad():
            exact = self.exact(attn, hidden_states, None, None, rotary_emb)
        ours = self.student(attn, hidden_states, None, None, rotary_emb)
        self.loss = F.mse_loss(ours.float(), exact.float()) / exact.float().var()
        return exact


# Clean latents and noise [B, C, F, Y, X], noise levels [B] and text [B, L, D]: what `velocity` takes.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Trainer:
    """Teacher, student and data of a run.

    Args:
        pipe: the embedded model; its transformer is the teacher and is not changed, but for its attention processors.
        settings, device: of the run.
        compile: whether to compile the blocks of both.
    """

    def __init__(self, pipe: Any, settings: BasedSettings, *, device: str, compile: bool) -> None:
        self.settings, self.device, self.compile = settings, device, compile
        self.log: list[dict[str, Any]] = []
        self.tokenizer, self.encoder = pipe.tokenizer, pipe.text_encoder.to(device).eval().requires_grad_(False)
        self.vae = pipe.vae.to(device).eval().requires_grad_(False)
        self.teacher = pipe.transformer.to(device).eval().requires_grad_(False)
        self.student = copy.deepcopy(self.teacher)
        if settings.rank:
            from peft import LoraConfig

            torch.manual_seed(settings.seed)
            self.student.add_adapter(LoraConfig(r=settings.rank, lora_alpha=settings.rank, target_modules=LORA_TARGETS))
        from vmonarch import apply

        processor = BasedProcessor(
            layers=settings.layers, feature_dim=settings.feature_dim, window=settings.window, decay=settings.decay
        )
        apply(self.student, processor)
        learnt = dict(self.student.named_parameters())
        self.lora = [p for name, p in learnt.items() if ".lora_" in name]
        self.own = [p for name, p in learnt.items() if ".processor." in name]
        stored = 2 * sum(parameter.numel() for parameter in (*self.lora, *self.own))
        if stored > MAX_BYTES:
            raise ValueError(f"rank={settings.rank} makes {stored} bytes of adapter, more than {MAX_BYTES}")

    def load_data(self) -> None:
        """Render and encode all clips, and those for validation, which training never sees."""
        settings = self.settings
        scenes = sample_scenes(settings.clips + settings.validation_clips, settings.seed + 11)
        captions = write_captions(scenes, settings.seed + 12, settings.captions_per_clip)
        tokens = tokenize(self.tokenizer, captions).view(len(scenes), settings.captions_per_clip, -1).to(self.device)
        batch = min(64, len(scenes))
        latents = encode_clips(self.vae, scenes, self.device, batch=batch, compile=self.compile)
        self.latents, self.held_out = latents[: settings.clips], latents[settings.clips :]
        self.tokens, held_out_tokens = tokens[: settings.clips], tokens[settings.clips :]
        self.held_out_text = self._encode(held_out_tokens[:, 0])

    def place_teacher(self) -> None:
        """Give exact attention its fast form in both models, and compile their blocks if asked for."""
        for model in (self.teacher, self.student):
            for block in model.blocks:
                # Not by `set_processor`, which refuses to replace any processor beside those that learn.
                block.attn2.processor = TrainingAttention(TEXT_LENGTH - self.tokens.shape[-1])
        for block in self.teacher.blocks:
            block.attn1.set_processor(TrainingAttention(0))
        if self.compile:
            compile_blocks(self.teacher, self.student)

    @torch.no_grad()
    def _encode(self, ids: torch.Tensor) -> torch.Tensor:
        return encode_text(self.encoder, ids, padding=1)[0].float()

    def draw(self, step: int) -> Batch:
        """The batch of a step, a function of seed and step alone; a tenth of the captions are empty."""
        settings = self.settings
        torch.manual_seed(settings.seed * 1_000_003 + step)
        _, clean, ids, _, noise, sigma = draw_clips(
            self.latents, self.tokens, settings.batch, 0.1, settings.sigma_shift
        )
        return clean, noise, sigma, self._encode(ids)

    @contextlib.contextmanager
    def training_processors(self, *, transfer: bool) -> Iterator[list[Transfer]]:
        """Put the fast form of Based on the student while the block runs; yields what is in transfer."""
        frames, height, width = self.latents.shape[2:]
        patch = self.student.config.patch_size
        grid = LatentGrid(frames // patch[0], height // patch[1], width // patch[2])
        index, present = neighbours(grid, grid.tokens, self.settings.window, None, torch.device(self.device))
        counts = torch.zeros(grid.tokens, grid.tokens, dtype=torch.int32, device=self.device)
        # Absent neighbours point at token 0: sums keep them from hiding one that is present.
        mask = counts.scatter_add_(1, index, present.int()) > 0
        placed: list[tuple[Any, BasedLayer]] = []
        transfers: list[Transfer] = []
        for block in self.student.blocks:
            layer = block.attn1.processor
            if not isinstance(layer, BasedLayer):
                continue
            placed.append((block.attn1, layer))
            processor: torch.nn.Module = layer if layer.kind == "conv" else DenseBased(layer, mask, grid.frames)
            if transfer:
                processor = Transfer(processor)
                transfers.append(processor)
            block.attn1.processor = processor
        try:
            yield transfers
        finally:
            for attn, layer in placed:
                attn.processor = layer

    def run(
        self,
        stage: str,
        parameters: list[torch.nn.Parameter],
        learning_rate: float,
        steps: int,
        time_limit: float,
        loss_of: Callable[[Batch], torch.Tensor],
    ) -> None:
        """Train these parameters and no others, and leave them at the average of the last steps."""
        for parameter in (*self.lora, *self.own):
            parameter.requires_grad_(any(parameter is p for p in parameters))
        if not parameters or steps == 0:
            return
        optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.0)
        average = [parameter.detach().clone() for parameter in parameters]

        def losses(step: int) -> dict[str, torch.Tensor]:
            batch = self.draw(step)
            with loop.autocast(self.device):
                return {"loss": loss_of(batch)}

        rate = loop.trapezoid(learning_rate, min(100, 1 + steps // 10), 0.5)
        limits: dict[str, Any] = {"steps": steps, "time_limit": time_limit}
        loop.train(stage, parameters, average, [optimizer], losses, rate=rate, ema=0.99, log=self.log, **limits)
        with torch.no_grad():
            torch._foreach_copy_([*parameters], average)

    def transfer(self, time_limit: float) -> None:
        """First stage: every layer by itself."""
        settings = self.settings
        with self.training_processors(transfer=True) as transfers:

            def loss_of(batch: Batch) -> torch.Tensor:
                velocity(self.student, *batch)
                return torch.stack([transfer.loss for transfer in transfers]).mean()

            rate = settings.transfer_learning_rate
            self.run("transfer", self.own, rate, settings.transfer_steps, time_limit, loss_of)

    def finetune(self, time_limit: float) -> None:
        """Second stage: the whole model."""
        settings = self.settings

        def loss_of(batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                exact = velocity(self.teacher, *batch)
            ours, (clean, noise, *_) = velocity(self.student, *batch), batch
            flow = (ours - (noise - clean)).square().mean()
            return (1 - settings.distillation) * flow + settings.distillation * (ours - exact).square().mean()

        with self.training_processors(transfer=False):
            learnt = [*self.own, *self.lora]
            self.run("finetune", learnt, settings.learning_rate, settings.steps, time_limit, loss_of)

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """On the clips held out, at every noise level: ‖v - v_exact‖/‖v_exact‖, and both models' flow matching loss.

        With the processor itself, in float32, and never compiled: that would take longer than it saves.
        """
        with torch.compiler.set_stance("force_eager"):
            return self._measure()

    def _measure(self) -> dict[str, Any]:
        torch.manual_seed(self.settings.seed + 13)
        noise = torch.randn(self.held_out.shape, device=self.device)
        results: dict[str, Any] = {"velocity_error": {}, "flow_loss": {}, "flow_loss_exact": {}}
        for level in SIGMAS:
            sums = torch.zeros(4, dtype=torch.float64, device=self.device)
            for start in range(0, len(self.held_out), 8):
                span = slice(start, start + 8)
                clean, target = self.held_out[span].float(), noise[span] - self.held_out[span].float()
                sigma = torch.full((len(clean),), level, device=self.device)
                given = (clean, noise[span], sigma, self.held_out_text[span])
                ours, exact = (velocity(model, *given).double() for model in (self.student, self.teacher))
                errors = (ours - exact, exact, ours - target, exact - target)
                sums += torch.stack([error.square().sum() for error in errors])
            count = noise.numel()
            results["velocity_error"][level] = (sums[0] / sums[1]).sqrt().item()
            results["flow_loss"][level] = (sums[2] / count).item()
            results["flow_loss_exact"][level] = (sums[3] / count).item()
        return results


def train(
    settings: BasedSettings,
    *,
    model: Path,
    output: Path,
    device: str,
    compile: bool,
    time_limit: float,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Train and save; see the module's docstring. Returns what it writes to the log."""
    from diffusers import WanPipeline

    from vmonarch import save_adapter
    from vmonarch.pipelines.environment import environment

    started = time.monotonic()
    left = lambda: time_limit - (time.monotonic() - started)
    trainer = Trainer(WanPipeline.from_pretrained(model), settings, device=device, compile=compile)
    seconds: dict[str, float] = {}
    measured: dict[str, Any] = {}

    def note(stage: str) -> None:
        seconds[stage] = round(time.monotonic() - started, 1)
        print(stage, f"{seconds[stage]}s", json.dumps(measured.get(stage, {}).get("velocity_error", {})), flush=True)

    trainer.load_data()
    trainer.place_teacher()
    note("data")
    measured["untrained"] = trainer.measure()
    note("untrained")
    trainer.transfer(0.2 * left())
    measured["transferred"] = trainer.measure()
    note("transferred")
    # The last measuring takes as long as the first.
    reserve = seconds["untrained"] - seconds["data"] + 5
    trainer.finetune(max(1.0, left() - reserve))
    measured["finetuned"] = trainer.measure()
    note("finetuned")
    save_adapter(trainer.student, output, dtype=torch.float16, overwrite=overwrite)
    report = {
        "settings": dataclasses.asdict(settings),
        "learnt_parameters": {"processor": _count(trainer.own), "lora": _count(trainer.lora)},
        "bytes": output.stat().st_size,
        "validation": {"clips": settings.validation_clips, **measured},
        "seconds": seconds,
        "log": trainer.log,
        "environment": environment(torch.device(device)),
    }
    write_json(output.with_suffix(".json"), report)
    return report


def _count(parameters: list[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    from vmonarch.pipelines.embedded import embedded_model_path

    parser = loop.training_parser("vmonarch.finetune.embedded.based", str(__doc__).splitlines()[0], BasedSettings())
    parser.add_argument("--output", type=Path, required=True, help="file to write, .safetensors")
    parser.add_argument("--model", type=Path, help="folder of an embedded model; the shipped one by default")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    options = parser.parse_args(arguments)
    zeros = (
        "rank", "transfer_steps", "steps", "transfer_learning_rate", "learning_rate", "distillation", "seed"
    )  # fmt: skip
    quick = {"clips": 2, "batch": 1, "transfer_steps": 2, "steps": 2, "validation_clips": 1}
    settings = loop.read_settings(parser, options, BasedSettings(), zeros, quick)
    if settings.distillation > 1:
        parser.error(f"--distillation must lie between 0 and 1, got {settings.distillation}")
    if options.output.suffix != ".safetensors":
        parser.error(f"--output must end with .safetensors, got {options.output}")
    for file in (options.output, options.output.with_suffix(".json")):
        if file.exists() and not options.overwrite:
            parser.error(f"--output: {file} exists; --overwrite replaces it")
    if settings.layers not in ("linear", "both", "conv", "based"):
        parser.error(f"--layers must be linear, both, conv or based, which learn something, got {settings.layers}")
    if settings.rank and importlib.util.find_spec("peft") is None:
        parser.error("--rank needs PEFT (pip install peft); --rank 0 trains without LoRA layers")
    if options.model is not None and not (options.model / "model_index.json").is_file():
        parser.error(f"--model must be the folder of a pipeline, got {options.model}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    train(
        settings,
        model=embedded_model_path() if options.model is None else options.model,
        output=options.output,
        device=options.device,
        compile=not options.no_compile and options.device != "cpu",
        time_limit=options.time_limit,
        overwrite=options.overwrite,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
