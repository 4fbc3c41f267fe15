"""A small model with joint attention, and the text's weight in it: `python -m vmonarch.eval.studies.joint`.

Where video and text share a softmax, VMonarch weighs the video by a lower bound of its partition function, lse − KL, so
that text counts e^KL times too much. The study trains a transformer of HunyuanVideo's shape on the embedded model's
clips, which start a stock pipeline of Wan by a wrapper, and compares three weights of the video:

    bound        what VMonarch has, F
    first-frame  F + δ, where δ [H, P] is what the bound lacks in the first frame, which is exact anyway
    true         the true lse: what a correction could reach

Legend: B batch, N = T·P tokens of the video in T frames, H heads, L tokens of text.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.cache_utils import CacheMixin
from diffusers.models.modeling_utils import ModelMixin

import vmonarch
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.similarity import psnr
from vmonarch.files import write_json
from vmonarch.finetune.embedded.data import held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import TEXT_DIM, TRAIN_TOKENS, attribute_targets, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import encode_clips, train_transformer
from vmonarch.finetune.embedded.vae import LATENT_CHANNELS
from vmonarch.grid import LatentGrid
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.processors import VMonarchProcessor
from vmonarch.sequence import TokenSequence, joint_attention
from vmonarch.video_processor import FullAttentionProcessor

Pair = tuple[torch.Tensor, torch.Tensor]


class JointTransformer(ModelMixin, ConfigMixin, CacheMixin):
    """HunyuanVideo's transformer, called as Wan's is: text is padded with rows of zeros, which it masks.

    Args:
        num_layers, num_single_layers: blocks of two streams and of one.
    """

    @register_to_config
    def __init__(
        self,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        in_channels: int = LATENT_CHANNELS,
        num_attention_heads: int = 4,
        attention_head_dim: int = 64,
        num_layers: int = 2,
        num_single_layers: int = 5,
        mlp_ratio: float = 2.5,
    ) -> None:
        super().__init__()
        space = attention_head_dim // 8 * 3
        self.model = diffusers.HunyuanVideoTransformer3DModel(
            in_channels=in_channels,
            out_channels=in_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            num_single_layers=num_single_layers,
            num_refiner_layers=1,
            mlp_ratio=mlp_ratio,
            patch_size=patch_size[1],
            patch_size_t=patch_size[0],
            guidance_embeds=False,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            rope_axes_dim=(attention_head_dim - 2 * space, space, space),
        )
        # Zero output at the start: the first prediction is zero, not noise.
        torch.nn.init.zeros_(self.model.proj_out.weight)
        torch.nn.init.zeros_(self.model.proj_out.bias)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Velocity [B, C, T, h, w] at latents of that shape, 1000·σ [B], and text [B, 512, 128]."""
        text = encoder_hidden_states[:, :TRAIN_TOKENS]
        there = text.ne(0).any(-1)
        pooled = text.sum(1) / there.sum(1, keepdim=True)
        return self.model(hidden_states, timestep, text, there.to(text.dtype), pooled, return_dict=return_dict)


class TrueWeight(VMonarchProcessor):
    """VMonarch whose video has its true weight beside the text."""

    def attend_with_lse(self, *tensors_and_grid: Any, **heads: Any) -> Pair:
        out, _ = super().attend_with_lse(*tensors_and_grid, **heads)
        return out, flash_entropy_attention(*tensors_and_grid[:3], implementation=self.implementation)[1]


class FirstFrameWeight(VMonarchProcessor):
    """VMonarch whose bound gets, at every head and position, what it lacks in the first frame."""

    def attend_with_lse(self, *tensors_and_grid: Any, **heads: Any) -> Pair:
        out, lse = super().attend_with_lse(*tensors_and_grid, **heads)
        *tensors, grid = tensors_and_grid[:4]
        options = dataclasses.replace(self.options, exact=None)
        _, bound = vmonarch_attention(
            *tensors, grid=grid, options=options, return_lse=True, implementation=self.implementation
        )
        frame = grid.tokens_per_frame
        # The rows of the first frame are exact: their lse is the true one.
        lacking = (lse[..., :frame] - bound[..., :frame]).clamp_min(0)
        corrected = bound.unflatten(2, (grid.frames, frame)) + lacking[:, :, None]
        return out, torch.cat([lse[..., :frame], corrected.flatten(2)[..., frame:]], 2)


WEIGHTS: dict[str, type[VMonarchProcessor]] = {
    "bound": VMonarchProcessor,
    "first-frame": FirstFrameWeight,
    "true": TrueWeight,
}


class Recorder(FullAttentionProcessor):
    """Exact attention that notes, of every joint call, what each weight would have made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[dict[str, float]] = []

    def attend_joint(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> torch.Tensor:
        out = super().attend_joint(query, key, value, key_mask)
        assert self._context is not None
        call = self._context.current(query.shape[1])
        assert call is not None
        self.notes.append(compare_weights(query, key, value, key_mask, call.grid, out))
        return out


def compare_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    grid: LatentGrid,
    exact: torch.Tensor,
) -> dict[str, float]:
    """Of one call [B, N + L, H, D]: the text's mass, true and by each weight, the row-KL, and the errors of the video's
    rows.
    """
    sequence = TokenSequence.of(grid, 0, query.shape[1])
    q, k, v = (sequence.video(x) for x in (query, key, value))
    logits = torch.einsum("bqhd,bkhd->bhqk", q.float(), sequence.beside(key).float()) * query.shape[-1] ** -0.5
    if key_mask is not None:
        logits = logits.masked_fill(~sequence.beside(key_mask)[:, None, None], -torch.inf)
    text = logits.logsumexp(-1)
    true = flash_entropy_attention(q, k, v)[1]
    rows = slice(grid.tokens_per_frame, None)  # those of the first frame are exact
    reference = sequence.video(exact)[:, rows].float()
    notes = {"mass": (text - true)[..., rows].sigmoid().mean().item()}
    for name, kind in WEIGHTS.items():
        processor = kind()
        pair = processor.attend_with_lse(q, k, v, grid)
        notes[f"mass {name}"] = (text - pair[1])[..., rows].sigmoid().mean().item()
        if name == "bound":
            notes["kl"] = (true - pair[1])[..., rows].mean().item()
        joined = joint_attention(
            query, key, value, sequence, key_mask, video=lambda *_, pair=pair: pair, exact=lambda q, k, v: q
        )
        error = (sequence.video(joined)[:, rows].float() - reference).norm() / reference.norm()
        notes[f"error {name}"] = error.item()
    return notes


@dataclasses.dataclass(frozen=True)
class JointStudy:
    """Sizes of a run; the clock ends the training before its steps."""

    minutes: float = 6.0
    clips: int = 16_384
    batch: int = 128
    steps: int = 100_000
    learning_rate: float = 1.5e-3
    prompts: int = 32
    denoising_steps: int = 20
    seed: int = 0


QUICK = JointStudy(clips=2, batch=2, steps=2, prompts=1, denoising_steps=2)


def train(study: JointStudy, device: str, compile: bool) -> tuple[Any, list[dict[str, Any]]]:
    """The trained pipeline, and the log of its training."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline
    from transformers import AutoTokenizer, UMT5EncoderModel

    base = embedded_model_path()
    vae = AutoencoderKLWan.from_pretrained(base / "vae").to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    text_encoder = UMT5EncoderModel.from_pretrained(base / "text_encoder")
    # Other clips than those of the embedded model.
    scenes = sample_scenes(study.clips, study.seed + 15_485)
    captions = write_captions(scenes, study.seed + 15_486, 4)
    tokens = tokenize(tokenizer, captions).view(study.clips, 4, -1).to(device)
    latents = encode_clips(vae, scenes, device, batch=min(64, study.clips), compile=compile)
    torch.manual_seed(study.seed)
    transformer, text_encoder, log = train_transformer(
        latents=latents,
        tokens=tokens,
        targets=attribute_targets(scenes).to(device),
        text_encoder=text_encoder,
        transformer=JointTransformer(),
        steps=study.steps,
        batch=study.batch,
        learning_rate=study.learning_rate,
        sigma_shift=EMBEDDED_SETTINGS.flow_shift,
        seed=study.seed,
        device=device,
        compile=compile,
        time_limit=60 * study.minutes,
    )
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=EMBEDDED_SETTINGS.flow_shift
    )
    pipe = WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, scheduler=scheduler, transformer=transformer
    ).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe, log


def sample(pipe: Any, prompts: Sequence[str], study: JointStudy, device: str) -> torch.Tensor:
    """Videos [prompts, F, 3, H, W] in [0, 1], always from the same noise."""
    settings, videos = EMBEDDED_SETTINGS, []
    for start in range(0, len(prompts), 16):
        some = list(prompts[start : start + 16])
        out = pipe(
            prompt=some,
            negative_prompt=[""] * len(some),
            height=settings.height,
            width=settings.width,
            num_frames=settings.num_frames,
            num_inference_steps=study.denoising_steps,
            guidance_scale=settings.guidance_scale,
            generator=[torch.Generator(device).manual_seed(start + i) for i in range(len(some))],
            output_type="pt",
        )
        videos.append(out.frames.float().cpu())
    return torch.cat(videos)


def measure(pipe: Any, study: JointStudy, device: str) -> dict[str, Any]:
    """{"attention": means over all calls of full attention, "psnr": {weight: dB of every prompt}}."""
    prompts = [prompt.prompt for prompt in held_out_prompts()[: study.prompts]]
    recorder = Recorder()
    vmonarch.apply(pipe, recorder)
    # Bound copies share the list.
    sample(pipe, prompts[:2], study, device)
    vmonarch.restore(pipe)
    notes = recorder.notes
    attention = {name: sum(note[name] for note in notes) / len(notes) for name in notes[0]}
    full = sample(pipe, prompts, study, device)
    found: dict[str, list[float]] = {}
    for name, kind in WEIGHTS.items():
        with vmonarch.apply(pipe, kind()):
            videos = sample(pipe, prompts, study, device)
        found[name] = [psnr(video, reference) for video, reference in zip(videos, full, strict=True)]
    return {"calls": len(notes), "attention": attention, "psnr": found}


def run(study: JointStudy, *, device: str, compile: bool, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """What the JSON holds."""
    record = script_record("studies.joint", arguments, device)
    started = time.monotonic()
    pipe, log = train(study, device, compile)
    trained = time.monotonic() - started
    parameters = sum(parameter.numel() for parameter in pipe.transformer.parameters())
    return {
        **record,
        "study": vars(study),
        "parameters": parameters,
        "log": log,
        "train_s": round(trained, 1),
        **measure(pipe, study, device),
        "seconds": round(time.monotonic() - started, 1),
    }


def joint_table(results: dict[str, Any]) -> str:
    """The text's mass, errors and PSNR by the weight of the video."""
    from vmonarch.eval.render.table import markdown

    attention = results["attention"]
    rows = [["full attention", f"{attention['mass']:.1%}", "–", "–"]]
    for name in WEIGHTS:
        scores = results["psnr"][name]
        error = f"{attention[f'error {name}']:.4f}"
        rows.append([name, f"{attention[f'mass {name}']:.1%}", error, f"{sum(scores) / len(scores):.2f}"])
    heading = ["weight of the video", "the text's mass", "relative error of attention", "PSNR, dB"]
    study, steps = results["study"], results["log"][-1]["step"]
    about = (
        f"Mean row-KL {attention['kl']:.3f}; {len(results['psnr']['bound'])} prompts, {study['denoising_steps']} steps;"
        f" {results['parameters'] / 1e6:.1f} M parameters, {steps:,} training steps; {results['hardware']},"
        f" {results['date']}. Made by `{results['command']}`."
    )
    return f"{markdown(heading, rows)}\n{about}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.joint", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument("--quick", action="store_true", help="two steps of everything, to see that it runs")
    parser.add_argument("--minutes", type=float, default=JointStudy.minutes, help="of training (default %(default)s)")
    options = parser.parse_args(arguments)
    study = QUICK if options.quick else JointStudy(minutes=options.minutes)
    compile = not options.no_compile and options.device != "cpu"
    results = run(study, device=options.device, compile=compile, arguments=arguments)
    write_json(options.output, results)
    print(json.dumps({"seconds": results["seconds"], "steps": results["log"][-1]["step"]}))
    print(joint_table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
