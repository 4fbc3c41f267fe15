"""`vmonarch bench`: the registry of benchmarks. Each is a module of `vmonarch.eval.bench`, imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vmonarch.cli.parser import Parser
from vmonarch.cli.sampling import add_recipe_argument

_EPILOG = """\
examples:
  vmonarch bench kernels                                  everything, within 9 minutes on an H200
  vmonarch bench kernels --quick --output quick.json      three shapes, d=128, within 2 minutes
  vmonarch bench kernels --shapes 43x28x52 24x44x80:40 --methods cudnn,vmonarch --passes forward
  vmonarch bench e2e --settings 1.3b-61x448x832           seconds per video with a model of random weights
  vmonarch bench e2e --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --settings 81x480x832 --methods full vmonarch-t3
  vmonarch bench norm --cases forward                     norm and rotary embedding, without gradients

All ways to compute a case take turns. Results are compared with a reference before anything is timed: a wrong one gets
no speed, and the command ends with exit code 1. What does not fit the budget is left out and named.
"""
_SEVERAL: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
_METHODS = "as `vmonarch compare` takes them (default: full vmonarch)"
# What every benchmark times, for the help; rounds and seconds if nothing else is asked for, and with --quick.
BENCHES: dict[str, tuple[str, tuple[int, float], tuple[int, float] | None]] = {
    "kernels": ("attention alone, against exact attention", (15, 540.0), (7, 120.0)),
    "e2e": ("denoising steps, and seconds per video", (5, 540.0), (2, 180.0)),
    "train": ("training steps, and their memory", (5, 300.0), None),
    "parallel": ("attention and models on several GPUs, by heads", (5, 540.0), None),
    "bias": ("attention with a low-rank bias", (9, 450.0), None),
    "based": ("linear and window attention", (9, 280.0), None),
    "norm": ("RMS norm and rotary embedding", (9, 240.0), None),
    "families": ("transformers beyond Wan", (5, 540.0), None),
    "sequence": ("text in the sequence of the video", (7, 240.0), None),
}
# Options of each: (name, what argparse is told).
_OPTIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "kernels": [
        ("--shapes", {**_SEVERAL, "help": "frames x height x width of the latent, such as 43x28x52, or 24x44x80:40 for"
         " 40 heads in place of 12 (default: those of the docs)"}),
        ("--head-dims", {**_SEVERAL, "help": "default: 128 64"}),
        ("--passes", {**_SEVERAL, "help": "forward, backward (forward and backward together); default: both"}),
        ("--methods", {**_SEVERAL, "help": "such as cudnn (default: all); an unknown one lists them"}),
    ],
    "e2e": [
        ("--settings", {**_SEVERAL, "help": "such as 1.3b-61x448x832 (default: the paper's five); see --model"}),
        ("--model", {"metavar": "MODEL", "help": "in place of the settings' own, which then may be sizes such as"
         " 61x448x832: of configs/models/ or a YAML file (random weights), a folder of a Wan pipeline, or a hub id"}),
        ("--modes", {**_SEVERAL, "help": "eager, compiled (default: both)"}),
        ("--methods", {**_SEVERAL, "help": _METHODS}),
        ("--steps", {"type": int, "default": 50, "metavar": "N", "help": "of a video (default %(default)s)"}),
        ("--no-guidance", {"dest": "guidance", "action": "store_false",
         "help": "one forward call a step, as few-step models have"}),
        ("--transformer-only", {"action": "store_true", "help": "no VAE and no text encoder"}),
        ("--compile-backend", {"default": "inductor", "metavar": "NAME",
         "help": "of torch.compile (default %(default)s)"}),
    ],
    "train": [
        ("--model", {"default": "wan2.1-1.3b", "metavar": "MODEL", "help": "of configs/models/, or a YAML file"}),
        ("--frames", {"type": int, "nargs": "+", "default": [61, 141], "metavar": "N", "help": "of a clip"}),
        ("--size", {"type": int, "nargs": 2, "default": [448, 832], "metavar": ("HEIGHT", "WIDTH"),
         "help": "of a clip"}),
        ("--methods", {**_SEVERAL, "help": _METHODS}),
    ],
    "parallel": [
        ("--ranks", {"nargs": "+", "type": int, "metavar": "N",
         "help": "numbers of processes, 1 among them (default: 1, 2, 4 …)"}),
        ("--cases", {"nargs": "*", "metavar": "LABEL", "help": "of attention (default: all; none: no attention)"}),
        ("--models", {"nargs": "*", "metavar": "SETTING", "help": "of `vmonarch bench e2e` (none: no model)"}),
        ("--modes", {**_SEVERAL, "help": "of models: eager, compiled (default: both)"}),
    ],
}  # fmt: skip
# Those of a single operator.
_OPERATOR: list[tuple[str, dict[str, Any]]] = [
    ("--methods", {**_SEVERAL, "help": "default: all; an unknown one lists them"}),
    ("--cases", {"default": "", "metavar": "REGEX", "help": "only cases whose label it is found in"}),
]


def words(values: Sequence[str] | None) -> list[str] | None:
    """Names separated by blanks or commas; None for None."""
    return None if values is None else [name for value in values for name in value.split(",") if name]


def positive(argument: str, value: float) -> Any:
    """`value`, if it is finite and above 0.

    Raises:
        InputError: it is not.
    """
    from vmonarch.configs import InputError

    if not (math.isfinite(value) and value > 0):
        raise InputError(argument, f"must be above 0, got {value:g}")
    return value


def head_dims(values: Sequence[str]) -> tuple[int, ...]:
    """Head dimensions from 1 to 256.

    Raises:
        InputError: anything else.
    """
    from vmonarch.configs import InputError
    from vmonarch.eval.bench.runner import choose

    dims = choose("head_dims", words(values) or [])
    if not all(dim.isdecimal() and 1 <= int(dim) <= 256 for dim in dims):
        raise InputError("head_dims", f"must be integers from 1 to 256, got {', '.join(dims)}")
    return tuple(map(int, dims))


Say = Callable[[str], None]


def _kernels(arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from vmonarch.eval.bench import kernels, runner

    chosen: dict[str, Any] = {}
    if arguments.quick:
        chosen = {"shapes": kernels.QUICK_SHAPES, "methods": kernels.QUICK_METHODS, "head_dims": (128,)}
    for name in ("shapes", "methods", "passes"):
        if (given := words(getattr(arguments, name))) is not None:
            chosen[name] = given
    if arguments.head_dims is not None:
        chosen["head_dims"] = head_dims(arguments.head_dims)
    results = runner.run_bench(kernels.bench(**chosen), **common)
    return results, runner.wrong_rows(results["cases"], kernels.OURS)


def _e2e(arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.bench import e2e, runner

    named = arguments.methods or ("full", "vmonarch")
    options = e2e.Options(
        modes=tuple(words(arguments.modes) or e2e.MODES),
        steps=positive("steps", arguments.steps),
        guidance=arguments.guidance,
        transformer_only=arguments.transformer_only,
        compile_backend=arguments.compile_backend,
    )
    bench = e2e.bench(
        e2e.choose_settings(words(arguments.settings), arguments.model, arguments.quick),
        [resolve_method(name, argument="methods", recipes=True) for name in named],
        options,
        arguments.device,
    )
    results = e2e.measure(bench, **common)
    return results, runner.wrong_rows(results["runs"][0]["cases"], ())


def _train(arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.bench import runner, train

    methods = [resolve_method(name, argument="methods") for name in arguments.methods or ("full", "vmonarch")]
    bench = train.bench(arguments.model, arguments.frames, arguments.size, methods)
    results = runner.run_bench(bench, **common)
    return results, runner.wrong_rows(results["cases"], bench.ours)


def _parallel(arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from vmonarch.eval.bench import parallel

    chosen = {name: getattr(arguments, name) for name in ("ranks", "cases", "models")}
    results = parallel.run_bench(**chosen, modes=words(arguments.modes) or parallel.MODES, **common)
    return results, parallel.wrong_rows(results)


def _operator(arguments: argparse.Namespace, common: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    from vmonarch.eval.bench import runner

    bench = importlib.import_module(f"vmonarch.eval.bench.{arguments.benchmark}").bench()
    results = runner.run_bench(bench, methods=words(arguments.methods), cases=arguments.cases, **common)
    return results, runner.wrong_rows(results["cases"], bench.ours)


_RUNS = {"kernels": _kernels, "e2e": _e2e, "train": _train, "parallel": _parallel}


def add_arguments(parser: Parser) -> None:
    """Declare the benchmarks and their arguments."""
    parser.epilog = _EPILOG
    commands = parser.add_commands("benchmark")
    for name, (line, (rounds, budget), quick) in BENCHES.items():
        of = commands.add_parser(name, help=line, description=f"Time {line}.")
        for option, told in _OPTIONS.get(name, _OPERATOR):
            of.add_argument(option, **told)
        if name == "e2e":
            add_recipe_argument(of, "methods", nargs="+")
        fast = ("", "") if quick is None else tuple(f", quick {value:g}" for value in quick)
        of.add_argument(
            "--rounds", type=int, metavar="N", help=f"measurements of each method (default {rounds}{fast[0]})"
        )
        of.add_argument(
            "--budget", type=float, metavar="SECONDS", help=f"begin nothing after it (default {budget:g}{fast[1]})"
        )
        if quick:
            of.add_argument("--quick", action="store_true", help="the main cases and methods only")
        of.add_argument(
            "--device", default="cuda", metavar="DEVICE", help="cuda (default), cuda:N; cpu with TRITON_INTERPRET=1"
        )
    merging = commands.add_parser("merge", help="put the JSON of several runs of `vmonarch bench e2e` together")
    merging.add_argument("parts", nargs="+", type=Path, metavar="FILE", help="JSON of `vmonarch bench e2e`")
    for name, of in parser.commands.items():
        of.set_defaults(benchmark=name)
        of.add_argument("--output", type=Path, metavar="FILE", help=f"JSON (default outputs/bench/{name}.json)")
        of.add_argument("--quiet", action="store_true", help="no progress; print the path only")


def teller(quiet: bool) -> Say:
    """What prints progress with the seconds since the beginning."""
    started = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print its tables.

    Raises:
        InputError: an argument cannot be used.
        WrongResultError: a result is wrong, or one of VMonarch is missing.
    """
    from vmonarch.eval.bench.gate import WrongResultError
    from vmonarch.eval.render.table import aligned
    from vmonarch.pipelines.environment import shown_command

    name = arguments.benchmark
    output = arguments.output or Path(f"outputs/bench/{name}.json")
    if name == "merge":
        from vmonarch.eval.bench.e2e import merge_files

        merge_files(arguments.parts, output)
        print(output)
        return
    _, usual, quick = BENCHES[name]
    rounds, budget = quick if quick is not None and arguments.quick else usual
    common = {
        "output": output,
        "rounds": positive("rounds", rounds if arguments.rounds is None else arguments.rounds),
        "budget": positive("budget", budget if arguments.budget is None else arguments.budget),
        "device": arguments.device,
        "command": shown_command(("vmonarch",), arguments.words),
        "say": teller(arguments.quiet),
    }
    results, wrong = _RUNS.get(name, _operator)(arguments, common)
    if not arguments.quiet:
        for table in results["tables"]:
            print(f"{aligned(table['header'], table['rows'])}\n")
        print(results["caption"])
    print(output)
    if wrong:
        raise WrongResultError(f"{len(wrong)} results are wrong or missing: {'; '.join(wrong)}")
