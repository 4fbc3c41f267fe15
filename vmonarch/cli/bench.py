"""`vmonarch bench` with its registry of benchmarks, each a module of `vmonarch.eval.bench`, and `vmonarch tune`."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vmonarch.cli.arguments import Parser, given_options

# What every benchmark times, for the help, and its default rounds and seconds.
BENCHES: dict[str, tuple[str, int, float]] = {
    "kernels": ("attention alone, against exact attention", 15, 540.0),
    "e2e": ("denoising steps, and seconds per video", 5, 540.0),
    "train": ("training steps, and their memory", 5, 300.0),
    "parallel": ("models on several GPUs, by heads", 5, 540.0),
}
_SEVERAL: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
_HEAD_DIMS = {"type": int, "nargs": "+", "metavar": "N", "help": "default: 128 64"}
_METHODS = {"nargs": "+", "metavar": "NAME", "help": "as `vmonarch compare` takes them (default: those of the docs)"}
# Options of each benchmark and of `vmonarch tune`: (names, arguments of `add_argument`).
_OPTIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "kernels": [
        ("--shapes", {**_SEVERAL, "help": "frames x height x width of the latent, such as 43x28x52, or 24x44x80:40 for"
         " 40 heads in place of 12 (default: those of the docs)"}),
        ("--head-dims", _HEAD_DIMS),
        ("--passes", {**_SEVERAL, "help": "forward, backward (forward and backward together); default: both"}),
        ("--methods", {**_SEVERAL, "help": "such as cudnn (default: all); an unknown one lists them"}),
    ],
    "e2e": [
        ("--settings", {**_SEVERAL, "help": "such as 1.3b-61x448x832 (default: the paper's five); see --model"}),
        ("--model", {"metavar": "MODEL", "help": "in place of the settings' own, which then may be sizes such as"
         " 61x448x832: of configs/models.yaml or a YAML file (random weights), a folder of Wan's, or a hub id"}),
        ("--modes", {**_SEVERAL, "help": "eager, compiled (default: both)"}),
        ("--methods --recipe", _METHODS),
        ("--steps", {"type": int, "metavar": "N", "help": "of a video (default 50)"}),
        ("--no-guidance", {"dest": "guidance", "action": "store_false",
         "help": "one forward call a step, as few-step models have"}),
        ("--cold", {"action": "store_true", "help": "also the first step in a new process that has compiled nothing"}),
        ("--transformer-only", {"action": "store_true", "help": "no VAE and no text encoder"}),
        ("--compile-backend", {"metavar": "NAME", "help": "of torch.compile (default inductor)"}),
    ],
    "train": [
        ("--model", {"metavar": "MODEL", "help": "of configs/models.yaml, or a YAML file (default wan2.1-1.3b)"}),
        ("--frames", {"type": int, "nargs": "+", "metavar": "N", "help": "of a clip (default 61 141)"}),
        ("--size", {"type": int, "nargs": 2, "metavar": ("HEIGHT", "WIDTH"), "help": "of a clip (default 448 832)"}),
        ("--methods", _METHODS),
    ],
    "parallel": [
        ("--ranks", {"nargs": "+", "type": int, "metavar": "N", "help": "processes, one of them 1 (default: 1 2 4 …)"}),
        ("--models", {"nargs": "+", "metavar": "SETTING", "help": "of `vmonarch bench e2e`"}),
        ("--modes", {**_SEVERAL, "help": "eager, compiled (default: both), or training alone"}),
        ("--methods", _METHODS),
    ],
    "tune": [
        ("--kernels", {**_SEVERAL, "help": "such as r_step l_output (default: all; an unknown one lists them)"}),
        ("--head-dims", _HEAD_DIMS),
        ("--budget", {"type": float, "metavar": "SECONDS", "help": "begin no kernel after this time (default 480)"}),
        ("--output", {"type": Path, "metavar": "FILE", "help": "table to write or extend (default: the chip's own)"}),
    ],
}  # fmt: skip


def _add_options(parser: argparse.ArgumentParser, name: str) -> None:
    options = [parser.add_argument(*words.split(), **told).dest for words, told in _OPTIONS[name]]
    about = "cuda (default), cuda:N; cpu with TRITON_INTERPRET=1"
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help=about)
    parser.set_defaults(options=options)


def add_bench(parser: Parser) -> None:
    commands = parser.add_commands()
    for name, (line, rounds, budget) in BENCHES.items():
        of = commands.add_parser(name, help=line, description=f"Time {line}.")
        _add_options(of, name)
        about = f"measurements of each method (default {rounds})"
        of.add_argument("--rounds", type=int, default=rounds, metavar="N", help=about)
        about = f"begin nothing after it (default {budget:g})"
        of.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help=about)
    merging = commands.add_parser("merge", help="put the JSON of several runs of `vmonarch bench e2e` together")
    merging.add_argument("parts", nargs="+", type=Path, metavar="FILE", help="JSON of `vmonarch bench e2e`")
    for name, of in parser.commands.items():
        of.set_defaults(benchmark=name)
        of.add_argument("--output", type=Path, metavar="FILE", help=f"JSON (default outputs/bench/{name}.json)")


def teller(quiet: bool) -> Callable[[str], None]:
    """A function that prints progress with the seconds since the start."""
    started = time.monotonic()

    def say(text: str) -> None:
        if not quiet:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    return say


def run_bench(arguments: argparse.Namespace) -> None:
    """time kernels, or whole denoising steps, against full attention; results are checked

    examples:
      vmonarch bench kernels                                  everything, within 9 minutes on an H200
      vmonarch bench kernels --shapes 43x28x52 24x44x80:40 --methods cudnn vmonarch --passes forward
      vmonarch bench e2e --settings 1.3b-61x448x832           seconds per video with a model of random weights
      vmonarch bench e2e --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --settings 81x480x832 --methods full vmonarch-t3

    All ways to compute a case take turns. Results are compared with a reference before anything is timed: a wrong one
    is not timed, and the command ends with exit code 1. What does not fit the budget is left out and named.
    """
    from vmonarch.eval.bench.runner import WrongResultError, run_bench
    from vmonarch.eval.render.tables import aligned
    from vmonarch.pipelines.environment import shown_command

    name = arguments.benchmark
    output = arguments.output or Path(f"outputs/bench/{name}.json")
    module = importlib.import_module(f"vmonarch.eval.bench.{'e2e' if name == 'merge' else name}")
    if name == "merge":
        module.merge_files(arguments.parts, output)
        print(output)
        return
    bench = module.bench(**given_options(arguments, *arguments.options))
    results = getattr(module, "measure", run_bench)(
        bench,
        output=output,
        rounds=arguments.rounds,
        budget=arguments.budget,
        device=arguments.device,
        command=shown_command(("vmonarch",), arguments.words),
        say=teller(arguments.quiet),
    )
    if not arguments.quiet:
        for table in results["tables"]:
            print(f"{aligned(table['header'], table['rows'])}\n")
        print(results["caption"])
    print(output)
    if wrong := results["wrong"]:
        raise WrongResultError(f"{len(wrong)} results are wrong or missing: {'; '.join(wrong)}")


def add_tune(parser: argparse.ArgumentParser) -> None:
    _add_options(parser, "tune")


def run_tune(arguments: argparse.Namespace) -> None:
    """find the kernels' launch options for the chip at hand

    examples:
      vmonarch tune                                          all kernels, d=128 and 64, within 8 minutes on an H200
      vmonarch tune --kernels r_step r_step_last --head-dims 128 --budget 120
      vmonarch tune --output my-chip.json                    a table of its own, to look at first

    Options that do not compile or change a result are rejected. Entries of other kernels in the table stay.
    """
    from vmonarch.eval.bench.tune import run_tune
    from vmonarch.eval.render.tables import aligned

    given = given_options(arguments, *arguments.options)
    results = run_tune(**given, device=arguments.device, say=teller(arguments.quiet))
    if not arguments.quiet:
        (table,) = results["tables"]
        print(aligned(table["header"], table["rows"]))
    print(results["table"])
