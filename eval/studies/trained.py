"""Attention that is trained, at equal work: `python -m vmonarch.eval.studies.trained --output JSON`.

A run is a method and what its training has of its own: "vmonarch", or "vmonarch objective=flow updates=500". Every run
starts from the weights of the embedded model, or of a proxy (`studies.proxy`), and takes the same updates on the same
clips, with several seeds. Full attention does so too, and as it is, it teaches the others where the objective is its
velocity. Beside the methods of `configs/attention` stand the peers of `vmonarch.eval.peers`: "topk:share=0.25", and
"vsa:share=0.25", "sla:share=0.18" and "tempered:num_iterations=1", which learn weights of their own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vmonarch.configs import InputError, build, parse_overrides
from vmonarch.configs.methods import AttentionMethod, resolve_method, with_options
from vmonarch.eval.attention_flops import recorded_call, relative_flops
from vmonarch.eval.peers import PEERS, SLA, Peer
from vmonarch.eval.prompt_score import generate, score_videos
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.eval.similarity import similarity
from vmonarch.eval.studies.finetune_scores import load
from vmonarch.files import check_output, write_json
from vmonarch.finetune.embedded import loop
from vmonarch.finetune.embedded.based import LORA_TARGETS
from vmonarch.finetune.embedded.data import HeldOutPrompt, held_out_prompts, sample_scenes
from vmonarch.finetune.embedded.text import TEXT_LENGTH, TRAIN_TOKENS, encode_text, tokenize, write_captions
from vmonarch.finetune.embedded.transformer import TrainingAttention, draw_clips, encode_clips, velocity
from vmonarch.finetune.models import Annealing, Experts, compile_blocks
from vmonarch.finetune.objective import NoiseLevels
from vmonarch.grid import LatentGrid
from vmonarch.installation import self_attention_modules
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.model_folder import find_model

RUNS: tuple[str, ...] = (
    "full",
    "vmonarch",
    "vmonarch-own",
    "vmonarch:plan=embedded-1.00",
    "two-resolution:share=0.2",
    "topk:share=0.25",
    "vsa:share=0.25",
    "sla:share=0.18",
    "local",
)
OBJECTIVES = ("flow", "velocity")
PRECISIONS = ("bf16", "fp32")
CAPTION_DROPOUT = 0.1


@dataclasses.dataclass(frozen=True)
class Training:
    """How a run is trained and tried.

    Args:
        objective: "velocity", what the teacher says; or "flow", noise minus clip.
        outputs: weight of the squared distance of every layer's attention output to the teacher's, relative to that.
        anneal: updates over which the layers go from full attention to the method, the last ones first.
        also: options of the method with which the trained weights are scored once more, such as "refresh=0.25".
        lora: rank of the layers that are trained in place of all weights; 0 for all weights.
        clip: norm that gradients are cut to.
        clips: that are trained on; `held_out` others are not.
        levels: of noise, at which held-out clips are tried.
        check: so many updates lie between two such trials.
        prompts: of the 64 held out; each gives `takes` videos, of `sampling_steps`.

    Raises:
        InputError: an objective or precision that there is not.
    """

    objective: str = "velocity"
    outputs: float = 0.0
    updates: int = 1500
    batch: int = 32
    learning_rate: float = 3e-4
    clip: float = 1.0
    ema: float = 0.998
    anneal: int = 0
    lora: int = 0
    also: str = ""
    precision: str = "bf16"
    clips: int = 16_384
    held_out: int = 256
    levels: int = 8
    check: int = 500
    prompts: int = 64
    takes: int = 2
    sampling_steps: int = EMBEDDED_SETTINGS.num_inference_steps

    def __post_init__(self) -> None:
        for name, supported in (("objective", OBJECTIVES), ("precision", PRECISIONS)):
            if getattr(self, name) not in supported:
                raise InputError(name, f"must be one of {', '.join(supported)}, got {getattr(self, name)!r}")

    def changed(self, overrides: Sequence[str]) -> Training:
        """With `key=value` words laid over it.

        Raises:
            InputError: an unknown key, or a value that is not supported.
        """
        return build(Training, dataclasses.asdict(self) | parse_overrides(overrides))


QUICK = Training(updates=2, batch=1, clips=2, held_out=2, levels=2, check=2, prompts=1, takes=1, sampling_steps=2)


def method_of(name: str) -> tuple[type[Peer] | None, AttentionMethod]:
    """(class of a peer or None, method) of a word of `resolve_method`, or of a peer and options of its base.

    Raises:
        InputError: an unknown name, or options that it has not.
    """
    kind, _, options = name.partition(":")
    if kind not in PEERS:
        return None, resolve_method(name, argument="--runs")
    peer, base = PEERS[kind]
    return peer, resolve_method(with_options(base, options), argument="--runs")


def put_on(name: str, transformer: Any, grid: LatentGrid) -> None:
    """Put a method on a transformer.

    Raises:
        InputError: as `method_of`.
    """
    peer, method = method_of(name)
    if peer is None:
        method.install(transformer)
        return
    options = method.processor().options
    attn: Any
    for _, attn in self_attention_modules(transformer):
        attn.set_processor(peer(attn, grid, options))


def settings_of(model: Path) -> dict[str, Any]:
    """What a proxy or the embedded model is run with."""
    return recommended_settings(find_model(str(model)))


def work(names: Sequence[str], model: Path) -> dict[str, float | None]:
    """Attention FLOPs over those of full attention, by the names of methods.

    The linear part of SLA has 2·S·D² multiplications for each head, beside 2·S²·D of full attention. The compressed
    branch of VSA has as many as the choice of tiles, which counts as nothing.

    Raises:
        InputError: as `method_of`.
    """
    methods = {name: method_of(name) for name in names}
    settings, pipe = settings_of(model), load(model, "cpu")
    size = {key: settings[key] for key in ("height", "width", "num_frames")}
    with recorded_call(pipe) as call:
        pipe("a circle", **size, num_inference_steps=1, output_type="latent")
    shares = relative_flops(call, [method for _, method in methods.values()], ["transformer"])
    linear = pipe.transformer.config.attention_head_dim / find_model(str(model)).grid(**size).tokens
    found = {name: (peer, shares[method.label]) for name, (peer, method) in methods.items()}
    return {name: share + linear if share and peer is SLA else share for name, (peer, share) in found.items()}


def draw_all(training: Training, model: Path, device: str, compile: bool, output: Path) -> None:
    """Write what all runs have in common: clips of both kinds, their captions, and the videos of the model as it is."""
    settings, pipe = settings_of(model), load(model, device)
    drawn = {}
    for name, count, seed in (("clips", training.clips, 15_485_863), ("held_out", training.held_out, 32_452_843)):
        scenes = sample_scenes(count, seed)
        tokens = tokenize(pipe.tokenizer, write_captions(scenes, seed + 1, 1))
        scale = settings["height"] // EMBEDDED_SETTINGS.height
        drawn[name] = encode_clips(pipe.vae, scenes, device, batch=min(64, count), compile=compile, scale=scale)
        drawn[f"{name}_tokens"] = tokens.view(count, 1, -1)
    torch.save(drawn | {"reference": sample(pipe, training, settings)}, output)


def prompts_of(training: Training) -> list[HeldOutPrompt]:
    """The held-out prompt of every video."""
    return training.takes * held_out_prompts()[: training.prompts]


def sample(pipe: Any, training: Training, settings: dict[str, Any]) -> torch.Tensor:
    """Videos of `prompts_of` a training, [B, F, Y, X, 3], with the precision of its products."""
    if training.precision == "bf16":
        pipe.transformer.forward = loop.autocast(str(pipe.device))(pipe.transformer.forward)
    return generate(
        pipe,
        [item.prompt for item in prompts_of(training)],
        seed=0,
        batch=16,
        steps=training.sampling_steps,
        guidance=settings["guidance"],
        size=(settings["height"], settings["width"], settings["num_frames"]),
    )


class Velocity(nn.Module):
    """`velocity` of a transformer with the precision of a training."""

    def __init__(self, transformer: Any, precision: str) -> None:
        super().__init__()
        self.transformer, self.rounds = transformer, precision == "bf16"

    def forward(
        self, clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        with loop.autocast(str(clean.device)) if self.rounds else contextlib.nullcontext():
            return velocity(self.transformer, clean, noise, sigma, text)


class Bench:
    """A process that runs: the model, full attention that teaches, and what was drawn.

    Args:
        model: folder of the pipeline.
        drawn: file that `draw_all` wrote.
    """

    def __init__(self, model: Path, drawn: Path, device: str, compile: bool) -> None:
        self.device, self.compile = device, compile
        self.settings, self.pipe = settings_of(model), load(model, device)
        self.encoder = self.pipe.text_encoder.eval().requires_grad_(False)
        self.stock = self.pipe.transformer.eval().requires_grad_(False)
        tensors = torch.load(drawn, weights_only=True)
        self.reference = tensors.pop("reference")
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.clips, self.tokens = tensors["clips"], tensors["clips_tokens"]
        self.held_out, self.captions = tensors["held_out"], tensors["held_out_tokens"]
        frames, height, width = self.clips.shape[2:]
        self.grid = LatentGrid(frames, height // 2, width // 2)
        self.teacher = self._model("full", compile)
        self._trials: dict[int, list[tuple[int, tuple[torch.Tensor, ...], torch.Tensor]]] = {}

    def _model(self, name: str, compile: bool = False, state: dict[str, torch.Tensor] | None = None) -> Any:
        """A transformer with a method, and with cross-attention as it is trained."""
        transformer = copy.deepcopy(self.stock)
        transformer.set_attn_processor(TrainingAttention(TEXT_LENGTH - TRAIN_TOKENS))
        if name != "full":
            put_on(name, transformer, self.grid)
        if state is not None:
            transformer.load_state_dict(state)
        if compile:
            compile_blocks(transformer)
        return transformer

    @torch.no_grad()
    def text(self, ids: torch.Tensor) -> torch.Tensor:
        return encode_text(self.encoder, ids, padding=1)[0].float()

    def velocity_of(self, model: Any, training: Training) -> Callable[..., torch.Tensor]:
        """`Velocity` of a model, for batches of a training.

        Where blocks are compiled, a GPU is told of a whole pass at once: its many small kernels take less time than it
        takes to ask for them one by one. What changes, or looks, during training cannot be part of such a pass.
        """
        predict = Velocity(model, training.precision)
        if not self.compile or training.anneal or training.outputs:
            return predict
        clean = torch.zeros(training.batch, *self.clips.shape[1:], device=self.device)
        text = self.text(self.tokens[: training.batch, 0])
        given = clean, torch.zeros_like(clean), clean.new_ones(training.batch), text
        graphed: Any = torch.cuda.make_graphed_callables(predict, given, allow_unused_input=True)
        return graphed

    @torch.no_grad()
    def trials(self, levels: int) -> list[tuple[int, tuple[torch.Tensor, ...], torch.Tensor]]:
        """(level of noise, arguments of `velocity`, the teacher's) of the held-out clips, always the same ones."""
        if levels not in self._trials:
            generator = torch.Generator(self.device).manual_seed(0)
            of_all = NoiseLevels("uniform", shift=self.settings["flow_shift"])
            found = self._trials[levels] = []
            for level, sigma in enumerate(of_all.levels((torch.arange(levels) + 0.5) / levels).tolist()):
                for start in range(0, len(self.held_out), 64):
                    clean = self.held_out[start : start + 64].float()
                    noise = torch.randn(clean.shape, generator=generator, device=self.device)
                    text = self.text(self.captions[start : start + 64, 0])
                    given = clean, noise, torch.full((len(clean),), sigma, device=self.device), text
                    with loop.autocast(self.device):
                        found.append((level, given, velocity(self.teacher, *given)))
        return self._trials[levels]

    @torch.no_grad()
    def losses(self, model: Any, levels: int) -> dict[str, list[float]]:
        """Of held-out clips, at every level of noise: of flow matching, and the distance to the teacher's velocity."""
        found = {name: [0.0] * levels for name in ("flow", "to_teacher")}
        for level, given, taught in self.trials(levels):
            clean, noise = given[:2]
            with loop.autocast(self.device):
                predicted = velocity(model, *given)
            for name, target in (("flow", noise - clean), ("to_teacher", taught)):
                square = (predicted - target).square().flatten(1).mean(1).sum().item()
                found[name][level] += square / len(self.held_out)
        return found

    @torch.no_grad()
    def heads(self, name: str, state: dict[str, torch.Tensor], levels: int) -> list[list[float]]:
        """Of every layer and head, the squared change of attention's output by a method, relative to full attention's.

        Both are of the trained weights, with what the layers before make of the held-out clips by the method.
        """
        model = self._model(name, state=state)
        modules: list[Any] = [attn for _, attn in self_attention_modules(model)]
        plain = TrainingAttention(TEXT_LENGTH - TRAIN_TOKENS)
        change, size = (torch.zeros(len(modules), modules[0].heads, device=self.device) for _ in range(2))

        def compare(layer: int) -> Callable[..., None]:
            def hook(attn: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                projection, attn.to_out[0] = attn.to_out[0], nn.Identity()
                own, full = (
                    processor(attn, *args, **named).float().unflatten(2, (attn.heads, -1))
                    for processor in (attn.processor, plain)
                )
                attn.to_out[0] = projection
                change[layer] += (own - full).square().sum((0, 1, 3))
                size[layer] += full.square().sum((0, 1, 3))

            return hook

        for layer, attn in enumerate(modules):
            attn.register_forward_pre_hook(compare(layer), with_kwargs=True)
        for _, given, _ in self.trials(levels):
            with loop.autocast(self.device):
                velocity(model, *given)
        found: list[list[float]] = (change / size).tolist()
        return found

    def scores(self, name: str, state: dict[str, torch.Tensor] | None, training: Training) -> dict[str, Any]:
        """Of the videos by weights, None for the model's own: beside the model as it is, and full attention by them."""

        def videos(method: str) -> torch.Tensor:
            self.pipe.transformer = copy.deepcopy(self.stock)
            put_on(method, self.pipe.transformer, self.grid)
            if state is not None:
                there = self.pipe.transformer.state_dict()
                self.pipe.transformer.load_state_dict({key: state[key] for key in there})
            return sample(self.pipe, training, self.settings)

        ours = videos(name)
        own = self.reference if state is None else ours if name == "full" else videos("full")
        shares, entries = score_videos(ours, prompts_of(training), self.reference, self.device)
        near = [
            similarity(*(x.to(self.device).permute(0, 3, 1, 2) for x in pair)) for pair in zip(ours, own, strict=True)
        ]
        return {
            "prompt_score": statistics.fmean((e["colour"] + e["shape"] + e["direction"]) / 3 for e in entries),
            "all": shares["all"],
            "psnr_to_shipped": shares.get("psnr_db"),
            "psnr": statistics.fmean(min(99.0, entry.psnr) for entry in near),
            "ssim": statistics.fmean(entry.ssim for entry in near),
        }

    def student(self, name: str, training: Training) -> Any:
        """A transformer with a method and with weights to train."""
        student = self._model(name, self.compile and not training.outputs)
        student.requires_grad_(not training.lora)
        if training.lora:
            from peft import LoraConfig

            student.add_adapter(LoraConfig(r=training.lora, lora_alpha=training.lora, target_modules=LORA_TARGETS))
            for key, parameter in student.named_parameters():
                parameter.requires_grad_(".lora_" in key or ".processor." in key)
        return student

    def run(self, name: str, training: Training, seed: int, thorough: bool) -> dict[str, Any]:
        """Train with a method, and score it.

        Args:
            thorough: also score it before, and find what its heads lose.
        """
        started = time.monotonic()
        torch.manual_seed(seed)
        student = self.student(name, training)
        annealing = Annealing(Experts({"transformer": student}), training.anneal)
        teacher = self._model("full") if training.outputs else self.teacher
        predict, teach = (self.velocity_of(model, training) for model in (student, teacher))
        outputs: dict[str, list[torch.Tensor]] = {"student": [], "teacher": []}
        for who, model in (("student", student), ("teacher", teacher)) if training.outputs else ():
            for _, attn in self_attention_modules(model):
                attn.register_forward_hook(lambda *call, kept=outputs[who]: kept.append(call[-1].float()))
        learnt = [parameter for parameter in student.parameters() if parameter.requires_grad]
        average = [parameter.detach().clone() for parameter in learnt]
        checks = [{"updates": 0, **self.losses(student, training.levels)}]

        def losses(update: int) -> dict[str, torch.Tensor]:
            torch.manual_seed(seed * 1_000_003 + update)
            annealing.at(update)
            shift = self.settings["flow_shift"]
            _, clean, ids, _, noise, sigma = draw_clips(self.clips, self.tokens, training.batch, CAPTION_DROPOUT, shift)
            given = (clean, noise, sigma, self.text(ids))
            for kept in outputs.values():
                kept.clear()
            target = given[1] - given[0]
            if training.objective == "velocity" or training.outputs:
                with torch.no_grad():
                    taught = teach(*given)
                target = taught if training.objective == "velocity" else target
            loss = (predict(*given) - target).square().mean()
            for own, full in zip(outputs["student"], outputs["teacher"], strict=True):
                share = (own - full).square().mean() / full.square().mean()
                loss = loss + training.outputs * share / len(outputs["student"])
            return {"loss": loss}

        def exchange() -> None:
            with torch.no_grad():
                for parameter, mean in zip(learnt, average, strict=True):
                    kept = parameter.clone()
                    parameter.copy_(mean)
                    mean.copy_(kept)

        def after(update: int, last: bool) -> None:
            if last or update % training.check == 0:
                exchange()
                checks.append({"updates": update, **self.losses(student, training.levels)})
                exchange()

        log: list[dict[str, Any]] = []
        loop.train(
            f"{name}, seed {seed}",
            learnt,
            average,
            [torch.optim.AdamW(learnt, betas=(0.9, 0.98), weight_decay=0.01, fused=self.device != "cpu")],
            losses,
            steps=training.updates,
            rate=loop.trapezoid(training.learning_rate, min(100, 1 + training.updates // 10), 0.5),
            ema=training.ema,
            clip=training.clip,
            log=log,
            after=after,
        )
        trained = time.monotonic() - started
        exchange()
        if training.lora:
            student.fuse_lora()
            student.unload_lora()
        state = student.state_dict()
        return {
            "seed": seed,
            "checks": checks,
            "before": self.scores(name, None, training) if thorough else None,
            "after": self.scores(name, state, training),
            "also": self.scores(with_options(name, training.also), state, training) if training.also else None,
            "heads": self.heads(name, state, training.levels) if thorough and name != "full" else None,
            "train_seconds": round(trained, 1),
            "seconds": round(time.monotonic() - started, 1),
        }


def loss_of(levels: Sequence[float]) -> float:
    """The mean of losses at levels of noise, each as often as training has it."""
    weights = [NoiseLevels().share(i / len(levels), (i + 1) / len(levels)) for i in range(len(levels))]
    return sum(weight * loss for weight, loss in zip(weights, levels, strict=True))


def table(results: dict[str, Any]) -> str:
    """Losses and how far they are above that of full attention, scores before and after: means over the seeds."""
    of_run = {words: [run for run in results["runs"] if run["run"] == words] for words in results["order"]}
    loss = lambda run: loss_of(run["checks"][-1]["flow"])
    full = next((runs for words, runs in of_run.items() if words.split()[0] == "full" and runs), None)
    control = None if full is None else statistics.fmean(map(loss, full))
    rows = []
    for words, runs in of_run.items():
        if not runs:
            continue
        share, losses = results["work"][words.split()[0]], [loss(run) for run in runs]
        more = "–" if control is None else f"{100 * (statistics.fmean(losses) / control - 1):+.1f} %"
        before = next((run["before"]["prompt_score"] for run in runs if run["before"]), None)
        first = loss_of(runs[0]["checks"][0]["flow"])
        cells = [words, "–" if share is None else percent(share)]
        cells += [f"{first:.4f}", f"{statistics.fmean(losses):.4f}{_spread(losses, 4)}", more]
        cells += ["–" if before is None else percent(before)]
        rows.append(cells + _scores([run["after"] for run in runs]))
        if again := [run["also"] for run in runs if run.get("also")]:
            rows.append(["the same weights, `also`", *["–"] * 5, *_scores(again)])
    heading = ["", "attention FLOPs", "loss before", "after", "more than full", "prompt score before", "after"]
    heading += ["PSNR dB to own full attention", "SSIM", "PSNR dB to shipped"]
    training = results["training"]
    seeds = len({run["seed"] for run in results["runs"]})
    about = f"{training['updates']} updates of {training['batch']} clips, objective {training['objective']}"
    return made(results, markdown(heading, rows), f"{about}, {seeds} seeds; ")


def _scores(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Cells of what `Bench.scores` found with every seed."""
    scores = [100 * run["prompt_score"] for run in runs]
    mean = lambda key, digits: shown_number(statistics.fmean(run[key] for run in runs), digits)
    cells = [f"{statistics.fmean(scores):.1f}{_spread(scores, 1)} %"]
    return [*cells, *(mean(key, digits) for key, digits in (("psnr", 1), ("ssim", 3), ("psnr_to_shipped", 1)))]


def _spread(values: Sequence[float], digits: int) -> str:
    """Standard deviation over the seeds."""
    return f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""


def earlier_runs(
    path: Path, training: Training, runs: Sequence[str], shares: dict[str, float | None]
) -> list[dict[str, Any]]:
    """Those that an output has of `runs`.

    Args:
        shares: `work` of the methods, by which the model is known, too.

    Raises:
        InputError: there is no such output, or it is of another training or model.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError("--resume", f"holds {str(path)!r}, which cannot be read: {error}") from error
    if found.get("training") != dataclasses.asdict(training):
        raise InputError("--resume", f"must be an output of the same training, {str(path)!r} is not")
    if other := [name for name, share in found["work"].items() if shares.get(name, share) != share]:
        raise InputError(
            "--resume", f"must be an output of the same model, but {other[0]!r} does other work in {str(path)!r}"
        )
    return [run for run in found["runs"] if run["run"] in runs]


_bench: Bench | None = None


def _begin(model: Path, drawn: Path, devices: Any, compile: bool) -> None:
    global _bench
    device = devices.get()
    # Graphs are recorded on the device of the process. "cuda" is the one that it has.
    if (index := torch.device(device).index) is not None:
        torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("high")
    _bench = Bench(model, drawn, device, compile and device != "cpu")


def _run(words: str, training: Training, seed: int, thorough: bool, deadline: float) -> dict[str, Any] | None:
    assert _bench is not None
    if time.time() > deadline:
        return None
    return {"run": words} | _bench.run(words.split()[0], training, seed, thorough)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.trained", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    parser.add_argument("--model", type=Path, default=embedded_model_path(), help="folder of a proxy")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), help="words of attention or topk, vsa, sla; see above")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--training", nargs="+", default=[], metavar="KEY=VALUE", help="of all runs")
    parser.add_argument("--quick", action="store_true", help="two updates of everything, to see that it runs")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument(
        "--devices", nargs="+", default=["cuda" if torch.cuda.is_available() else "cpu"], help="a process for each"
    )
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no run is begun")
    parser.add_argument("--resume", type=Path, help="output of the same command, whose runs are kept")
    options = parser.parse_args(arguments)
    deadline = time.time() + options.budget
    try:
        check_output(options.output)
        training = (QUICK if options.quick else Training()).changed(options.training)
        own = {words: training.changed(words.split()[1:]) for words in options.runs}
        shares = work(list(dict.fromkeys(words.split()[0] for words in options.runs)), options.model)
        done = [] if options.resume is None else earlier_runs(options.resume, training, options.runs, shares)
    except InputError as error:
        parser.error(str(error))
    device, compile = options.devices[0], not options.no_compile
    record = script_record("studies.trained", arguments, device)
    record |= {"training": dataclasses.asdict(training), "order": options.runs, "work": shares, "runs": done}
    kept = {(run["run"], run["seed"]) for run in done}
    context = multiprocessing.get_context("spawn")
    failed: list[BaseException] = []
    devices = context.Queue()
    for name in options.devices:
        devices.put(name)
    with tempfile.TemporaryDirectory() as folder:
        drawn = Path(folder) / "drawn.pt"
        with ProcessPoolExecutor(1, context) as executor:  # which leaves nothing on the device
            executor.submit(draw_all, training, options.model, device, compile and device != "cpu", drawn).result()
        shared = options.model, drawn, devices, compile
        with ProcessPoolExecutor(len(options.devices), context, _begin, shared) as executor:
            futures = [
                executor.submit(_run, words, own[words], seed, seed == options.seeds[0], deadline)
                for seed in options.seeds
                for words in options.runs
                if (words, seed) not in kept
            ]
            for future in as_completed(futures):
                if (problem := future.exception()) is not None:
                    failed.append(problem)
                    traceback.print_exception(problem)
                elif (run := future.result()) is not None:
                    record["runs"].append(run)
                    shown = ("run", "seed", "after", "train_seconds", "seconds")
                    print(json.dumps({key: run[key] for key in shown}), flush=True)
                    write_json(options.output, record)
    print(table(record))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
