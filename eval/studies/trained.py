"""Attention that is trained, at equal work: `python -m vmonarch.eval.studies.trained --output JSON`.

Every method starts from the embedded model's weights and takes the same updates on the same clips, with several seeds.
Full attention does so too, and as it is, it teaches the others if the objective is its velocity. Beside the methods of
`configs/attention` stand two peers that learn weights of their own (`VSA`, `SLA`).

Legend: B videos, C latent channels, T latent frames, h and w latent pixels, S tokens, H heads, D head dim, m tiles of
keys, n tiles of queries.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.eval.prompt_score import generate, score_videos
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.eval.similarity import similarity
from vmonarch.files import check_output, write_json
from vmonarch.finetune.embedded import loop
from vmonarch.finetune.embedded.data import held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import TEXT_LENGTH, TRAIN_TOKENS, encode_text, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import TrainingAttention, draw_clips, encode_clips, project, velocity
from vmonarch.grid import LatentGrid
from vmonarch.installation import self_attention_modules
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.kernels.two_resolution.reference import chosen_tiles, tile_means
from vmonarch.kernels.two_resolution.tiling import places_of, tiling_of
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.two_resolution_options import TwoResolutionOptions

METHODS: tuple[str, ...] = (
    "full",
    "vmonarch",
    "vmonarch-own",
    "vmonarch:plan=embedded-1.00",
    "two-resolution:share=0.15",
    "block-topk:sparsity=0.75,cube=[4,3,5]",
    "vsa:0.25",
    "sla:0.1875",
    "local",
)
OBJECTIVES = ("flow", "velocity")
# Of a peer's tiles: the box of at most 64 tokens that divides the embedded model's grid.
CUBE = (4, 3, 5)
CAPTION_DROPOUT = 0.1


@dataclasses.dataclass(frozen=True)
class Training:
    """Sizes of a run.

    Args:
        objective: "flow", noise minus clip; or "velocity", what the teacher says.
        clips: that are trained on; `held_out` others are not.
        levels: of noise, at which held-out clips are tried.
        check: so many updates lie between two such trials.
        prompts: of the 64 held out; `sampling_steps` for each.
    """

    objective: str = "flow"
    updates: int = 1500
    batch: int = 32
    learning_rate: float = 3e-4
    ema: float = 0.998
    clips: int = 16_384
    held_out: int = 256
    levels: int = 8
    check: int = 500
    prompts: int = 64
    sampling_steps: int = EMBEDDED_SETTINGS.num_inference_steps


QUICK = Training(updates=2, batch=1, clips=2, held_out=2, levels=2, check=2, prompts=1, sampling_steps=2)


class Control(nn.Module):
    """A peer in one attention module of a Wan model: exact attention to the best tiles of keys, and a learnt part.

    Args:
        attn: the module.
        grid: of the tokens.
        share: of the tiles of keys that are exact.
    """

    def __init__(self, attn: Any, grid: LatentGrid, share: float) -> None:
        super().__init__()
        self.grid = grid
        self.options = TwoResolutionOptions(share=share, tile=CUBE, query_tile=CUBE, rest=False)
        self.tiling = tiling_of(grid, self.options)

    def forward(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        query, key, value = project(attn, hidden_states, hidden_states, rotary_emb)
        query, key = query.to(value.dtype), key.to(value.dtype)
        exact = chosen_tiles(query, key, self.tiling, self.options, scale=query.shape[-1] ** -0.5).exact
        near = two_resolution_attention(
            query, key, value, grid=self.grid, options=self.options, selection=exact.contiguous()
        )
        out = near + self.far(hidden_states, query, key, value, exact).to(near.dtype)
        projected: torch.Tensor = attn.to_out[0](out.flatten(2, 3))
        return projected

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor:
        """[B, S, H, D] that the tiles chosen, `exact` [B, H, n, m], do not tell."""
        raise NotImplementedError

    def to_tokens(self, of_tiles: torch.Tensor) -> torch.Tensor:
        """[B, H, n, …] of tiles of queries as [B, S, H, …] of the tokens."""
        places = places_of(self.tiling.of_queries, of_tiles.device)
        tile = places.place // places.token.shape[1]
        return of_tiles[:, :, tile].transpose(1, 2)


class VSA(Control):
    """The compressed branch: attention between the means of cubes, times a gate of the token's own.

    The gate is linear in the token and 0 at first, as where the authors finetune.

    Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention (2025), §3.
    """

    def __init__(self, attn: Any, grid: LatentGrid, share: float) -> None:
        super().__init__(attn, grid, share)
        width = attn.to_q.in_features
        self.gate = nn.Linear(width, width).to(attn.to_q.weight)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor:
        q, k, v = (tile_means(x, self.tiling) for x in (query, key, value))
        compressed = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v
        return self.to_tokens(compressed) * self.gate(hidden_states).unflatten(2, (query.shape[2], -1))


class SLA(Control):
    """Linear attention to the tiles that are not chosen, with softmax as feature map, and a projection, 0 at first.

    No tile is left out; the paper's share of negligible ones saves nothing in a linear part.

    Source: Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable Sparse-Linear Attention
    (2025).
    """

    def __init__(self, attn: Any, grid: LatentGrid, share: float) -> None:
        super().__init__(attn, grid, share)
        dim = attn.to_q.out_features // attn.heads
        self.projection = nn.Linear(dim, dim, bias=False).to(attn.to_q.weight)
        nn.init.zeros_(self.projection.weight)

    def far(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, exact: Any
    ) -> torch.Tensor:
        q, k = (torch.softmax(x.float(), -1) for x in (query, key))
        places = places_of(self.tiling, key.device)
        present = places.present[None, :, :, None, None]
        of_tiles = lambda x: torch.where(present, x[:, places.token], 0)  # [B, m, b, H, …]
        keys = of_tiles(k)
        sums = torch.einsum("bmphd,bmphe->bhmde", keys, of_tiles(value.float()))
        rest = (~exact).float()  # [B, H, n, m]
        states = torch.einsum("bhnm,bhmde->bhnde", rest, sums)
        totals = torch.einsum("bhnm,bhmd->bhnd", rest, keys.sum(2).transpose(1, 2))
        there = places_of(self.tiling.of_queries, key.device)
        queries = q[:, there.token]  # [B, n, a, H, D]
        mass = torch.einsum("bnahd,bhnd->bnah", queries, totals)
        linear = torch.einsum("bnahd,bhnde->bnahe", queries, states) / mass.clamp(min=1e-6).unsqueeze(-1)
        return self.projection(linear.flatten(1, 2)[:, there.place])


CONTROLS: dict[str, type[Control]] = {"vsa": VSA, "sla": SLA}


def put_on(name: str, transformer: Any, grid: LatentGrid) -> None:
    """Put a method on a transformer: a word of `resolve_method`, or `KIND:SHARE` of `CONTROLS`.

    Raises:
        InputError: an unknown name.
    """
    kind, _, share = name.partition(":")
    if kind not in CONTROLS:
        resolve_method(name, argument="--methods").install(transformer)
        return
    attn: Any
    for _, attn in self_attention_modules(transformer):
        attn.set_processor(CONTROLS[kind](attn, grid, float(share)))


def work(names: Sequence[str]) -> dict[str, float | None]:
    """Attention FLOPs over those of full attention, by the names.

    A peer's exact tiles count as those of block-topk. The linear part of SLA has 2·S·D² multiplications for each head
    beside 2·S²·D of full attention; the compressed branch of VSA has as many as the choice of tiles, which counts.
    """
    from diffusers import WanPipeline

    words = {}
    for name in names:
        kind, _, share = name.partition(":")
        sparse = f"block-topk:sparsity={1 - float(share)},cube={list(CUBE)}" if kind in CONTROLS else name
        words[name] = resolve_method(sparse, argument="--methods")
    settings, pipe = EMBEDDED_SETTINGS, WanPipeline.from_pretrained(embedded_model_path())
    pipe.set_progress_bar_config(disable=True)
    size = {key: getattr(settings, key) for key in ("height", "width", "num_frames")}
    with recorded_call(pipe) as call:
        pipe("a circle", **size, num_inference_steps=1, output_type="latent")
    shares = relative_flops(call, list(words.values()), ["transformer"])
    found = {name: shares[method.label] for name, method in words.items()}
    tokens = (1 + (settings.num_frames - 1) // 4) * (settings.height // 16) * (settings.width // 16)
    linear = pipe.transformer.config.attention_head_dim / tokens
    return {n: share + linear if share is not None and n.startswith("sla:") else share for n, share in found.items()}


class Bench:
    """What all runs in a process have in common: the model, clips of both kinds, and the teacher's videos."""

    def __init__(self, training: Training, device: str, compile: bool) -> None:
        from diffusers import WanPipeline

        self.training, self.device, self.compile = training, device, compile
        self.pipe = WanPipeline.from_pretrained(embedded_model_path()).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.encoder = self.pipe.text_encoder.eval().requires_grad_(False)
        self.stock = self.pipe.transformer.eval().requires_grad_(False)
        self.clips, self.tokens = self._clips(training.clips, 15_485_863)
        self.held_out, self.captions = self._clips(training.held_out, 32_452_843)
        frames, height, width = self.clips.shape[2:]
        self.grid = LatentGrid(frames, height // 2, width // 2)
        self.teacher = self._fast(copy.deepcopy(self.stock), "full")
        self.reference = self.videos(self.stock)

    def _clips(self, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        scenes = sample_scenes(count, seed)
        tokens = tokenize(self.pipe.tokenizer, write_captions(scenes, seed + 1, 1)).to(self.device)
        latents = encode_clips(self.pipe.vae, scenes, self.device, batch=min(64, count), compile=self.compile)
        return latents, tokens.view(count, 1, -1)

    def _fast(self, transformer: Any, name: str) -> Any:
        """A transformer with a method, and with cross-attention as it is trained."""
        transformer.set_attn_processor(TrainingAttention(TEXT_LENGTH - TRAIN_TOKENS))
        if name != "full":
            put_on(name, transformer, self.grid)
        elif self.compile:
            transformer.compile_repeated_blocks(dynamic=False)
        return transformer

    @torch.no_grad()
    def text(self, ids: torch.Tensor) -> torch.Tensor:
        return encode_text(self.encoder, ids, padding=1)[0].float()

    def videos(self, transformer: Any) -> torch.Tensor:
        """Of the held-out prompts, [B, F, Y, X, 3]."""
        self.pipe.transformer, settings = transformer, EMBEDDED_SETTINGS
        return generate(
            self.pipe,
            [item.prompt for item in held_out_prompts()[: self.training.prompts]],
            seed=0,
            batch=16,
            steps=self.training.sampling_steps,
            guidance=settings.guidance_scale,
            size=(settings.height, settings.width, settings.num_frames),
        )

    @torch.no_grad()
    def losses(self, model: Any) -> dict[str, list[float]]:
        """Of held-out clips, at every level of noise: of flow matching, and the distance to the teacher's velocity."""
        training = self.training
        found: dict[str, list[float]] = {"levels": [], "flow": [], "to_teacher": []}
        generator = torch.Generator(self.device).manual_seed(0)
        for level in range(training.levels):
            u, shift = (level + 0.5) / training.levels, EMBEDDED_SETTINGS.flow_shift
            sigma = shift * u / (1 + (shift - 1) * u)
            sums = [0.0, 0.0]
            for start in range(0, training.held_out, 64):
                clean = self.held_out[start : start + 64].float()
                noise = torch.randn(clean.shape, generator=generator, device=self.device)
                text = self.text(self.captions[start : start + 64, 0])
                given = (clean, noise, torch.full((len(clean),), sigma, device=self.device), text)
                with loop.autocast(self.device):
                    predicted, taught = velocity(model, *given), velocity(self.teacher, *given)
                for i, target in enumerate((noise - clean, taught)):
                    sums[i] += (predicted - target).square().flatten(1).mean(1).sum().item()
            found["levels"].append(round(sigma, 4))
            found["flow"].append(sums[0] / training.held_out)
            found["to_teacher"].append(sums[1] / training.held_out)
        return found

    def scores(self, name: str, state: dict[str, torch.Tensor] | None) -> dict[str, Any]:
        """Of the videos by weights, None for the model's own: beside the model as it is, and full attention by them."""
        sampler, full = copy.deepcopy(self.stock), copy.deepcopy(self.stock)
        put_on(name, sampler, self.grid)
        if state is not None:
            sampler.load_state_dict(state)
            full.load_state_dict({key: state[key] for key in full.state_dict()})
        videos = self.videos(sampler)
        prompts = held_out_prompts()[: self.training.prompts]
        shares, entries = score_videos(videos, prompts, self.reference, self.device)
        score = statistics.fmean((e["colour"] + e["shape"] + e["direction"]) / 3 for e in entries)
        own = self.reference if state is None else videos if name == "full" else self.videos(full)
        near = [
            similarity(*(x.to(self.device).permute(0, 3, 1, 2) for x in pair)) for pair in zip(videos, own, strict=True)
        ]
        return {
            "prompt_score": score,
            "all": shares["all"],
            "psnr_to_shipped": shares.get("psnr_db"),
            "psnr": statistics.fmean(min(99.0, entry.psnr) for entry in near),
            "ssim": statistics.fmean(entry.ssim for entry in near),
        }

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """Train with a method, and score it before and after."""
        training, started = self.training, time.monotonic()
        torch.manual_seed(seed)
        student = self._fast(copy.deepcopy(self.stock).requires_grad_(True), name)
        learnt = [parameter for parameter in student.parameters() if parameter.requires_grad]
        average = [parameter.detach().clone() for parameter in learnt]
        checks = [{"updates": 0, **self.losses(student)}]

        def losses(update: int) -> dict[str, torch.Tensor]:
            torch.manual_seed(seed * 1_000_003 + update)
            shift = EMBEDDED_SETTINGS.flow_shift
            _, clean, ids, _, noise, sigma = draw_clips(self.clips, self.tokens, training.batch, CAPTION_DROPOUT, shift)
            given = (clean, noise, sigma, self.text(ids))
            with loop.autocast(self.device):
                target = noise - clean
                if training.objective == "velocity":
                    with torch.no_grad():
                        target = velocity(self.teacher, *given)
                return {"loss": (velocity(student, *given) - target).square().mean()}

        def exchange() -> None:
            with torch.no_grad():
                for parameter, mean in zip(learnt, average, strict=True):
                    kept = parameter.clone()
                    parameter.copy_(mean)
                    mean.copy_(kept)

        def after(update: int, last: bool) -> None:
            if last or update % training.check == 0:
                exchange()
                checks.append({"updates": update, **self.losses(student)})
                exchange()

        log: list[dict[str, Any]] = []
        loop.train(
            f"{name}, seed {seed}",
            learnt,
            average,
            [torch.optim.AdamW(learnt, betas=(0.9, 0.98), weight_decay=0.01)],
            losses,
            steps=training.updates,
            rate=loop.trapezoid(training.learning_rate, min(100, 1 + training.updates // 10), 0.5),
            ema=training.ema,
            log=log,
            after=after,
        )
        trained = time.monotonic() - started
        exchange()
        state = student.state_dict()
        return {
            "method": name,
            "seed": seed,
            "checks": checks,
            "before": self.scores(name, None) if seed == 0 else None,
            "after": self.scores(name, state),
            "train_seconds": round(trained, 1),
            "seconds": round(time.monotonic() - started, 1),
        }


def table(results: dict[str, Any]) -> str:
    """Losses and how far they are above that of full attention, scores before and after: means over the seeds."""
    by_method = {name: [run for run in results["runs"] if run["method"] == name] for name in results["work"]}
    loss = lambda run: statistics.fmean(run["checks"][-1]["flow"])
    control = statistics.fmean(map(loss, by_method["full"])) if by_method.get("full") else None
    rows = []
    for name, runs in by_method.items():
        if not runs:
            continue
        share, losses = results["work"][name], [loss(run) for run in runs]
        more = "–" if control is None else f"{100 * (statistics.fmean(losses) / control - 1):+.1f} %"
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        before = next((run["before"]["prompt_score"] for run in runs if run["before"]), None)
        first = statistics.fmean(runs[0]["checks"][0]["flow"])
        cells = [name, "–" if share is None else percent(share)]
        cells += [f"{first:.4f}", f"{statistics.fmean(losses):.4f}{spread}", more]
        cells += ["–" if before is None else percent(before)]
        cells += [percent(statistics.fmean(run["after"]["prompt_score"] for run in runs))]
        for key, digits in (("psnr", 1), ("ssim", 3)):
            cells.append(shown_number(statistics.fmean(run["after"][key] for run in runs), digits))
        rows.append(cells)
    heading = ["", "attention FLOPs", "loss before", "after", "more than full", "prompt score before", "after"]
    heading += ["PSNR dB to own full attention", "SSIM"]
    training = results["training"]
    seeds = len({run["seed"] for run in results["runs"]})
    about = f"{training['updates']} updates of {training['batch']} clips, objective {training['objective']}"
    return made(results, markdown(heading, rows), f"{about}, {seeds} seeds; ")


_bench: Bench | None = None


def _begin(training: Training, devices: Any, compile: bool) -> None:
    global _bench
    device = devices.get()
    torch.set_float32_matmul_precision("high")
    _bench = Bench(training, device, compile and device != "cpu")


def _run(name: str, seed: int, deadline: float) -> dict[str, Any] | None:
    assert _bench is not None
    return None if time.time() > deadline else _bench.run(name, seed)


def run_all(
    jobs: Sequence[tuple[str, int]], training: Training, devices: Sequence[str], compile: bool, deadline: float
) -> Iterator[dict[str, Any]]:
    """The runs, as they are done, in one process for each of `devices`; none begins after the deadline."""
    context = multiprocessing.get_context("spawn")
    shared = context.Queue()
    for device in devices:
        shared.put(device)
    with ProcessPoolExecutor(len(devices), context, _begin, (training, shared, compile)) as executor:
        for future in as_completed([executor.submit(_run, name, seed, deadline) for name, seed in jobs]):
            if (found := future.result()) is not None:
                yield found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.trained", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="words of attention, vsa:SHARE, sla:SHARE")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--objective", choices=OBJECTIVES, default=Training.objective)
    parser.add_argument("--updates", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--quick", action="store_true", help="two updates of everything, to see that it runs")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument(
        "--devices", nargs="+", default=["cuda" if torch.cuda.is_available() else "cpu"], help="of runs"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no run is begun")
    options = parser.parse_args(arguments)
    names = ("objective", "updates", "learning_rate")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    training = dataclasses.replace(QUICK if options.quick else Training(), **given)
    try:
        check_output(options.output)
        shares = work(options.methods)
    except InputError as error:
        parser.error(str(error))
    deadline = time.time() + options.budget
    record = script_record("studies.trained", arguments, options.devices[0])
    record |= {"training": dataclasses.asdict(training), "runs": [], "work": shares}
    jobs = [(name, seed) for seed in options.seeds for name in options.methods]
    for run in run_all(jobs, training, options.devices, not options.no_compile, deadline):
        record["runs"].append(run)
        print(
            json.dumps({key: run[key] for key in ("method", "seed", "after", "train_seconds", "seconds")}), flush=True
        )
        write_json(options.output, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
