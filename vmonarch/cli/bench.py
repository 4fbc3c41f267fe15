"""`vmonarch bench`: the registry of benchmarks. Each is a module of `vmonarch.eval.bench`, imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Benchmark:
    """A benchmark of the registry.

    Args:
        line: what it times, for the help.
        add_arguments: declares what it alone understands.
        run: (arguments, say) -> what is wrong or missing; `say` prints progress.
        rounds, budget: measurements of each method, and seconds, if nothing else is asked for.
        quick: the same with `--quick`, where there is that.
    """

    line: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Callable[[str], None]], list[str]]
    rounds: int
    budget: float
    quick: tuple[int, float] | None = None


def _kernels_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        **_SEVERAL,
        help="frames x height x width of the latent, such as 43x28x52, or 24x44x80:40 for 40 heads in place of 12"
        " (default: those of the docs)",
    )
    parser.add_argument("--head-dims", **_SEVERAL, help="default: 128 64")
    parser.add_argument("--passes", **_SEVERAL, help="forward, backward (forward and backward together); default: both")
    parser.add_argument("--methods", **_SEVERAL, help="such as cudnn (default: all); an unknown one lists them")


def _e2e_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--settings", **_SEVERAL, help="such as 1.3b-61x448x832 (default: the paper's five); see --model"
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="in place of the settings' own, which then may be sizes such as 61x448x832: of configs/models/ or a YAML"
        " file (random weights), a folder of a Wan pipeline, or a hub id",
    )
    parser.add_argument("--modes", **_SEVERAL, help="eager, compiled (default: both)")
    parser.add_argument("--methods", **_SEVERAL, help="as `vmonarch compare` takes them (default: full vmonarch)")
    add_recipe_argument(parser, "methods", nargs="+")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of a video (default %(default)s)")
    parser.add_argument(
        "--no-guidance", dest="guidance", action="store_false", help="one forward call a step, as few-step models have"
    )
    parser.add_argument("--transformer-only", action="store_true", help="no VAE and no text encoder")
    parser.add_argument(
        "--compile-backend", default="inductor", metavar="NAME", help="of torch.compile (default %(default)s)"
    )


def _operator_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", **_SEVERAL, help="default: all; an unknown one lists them")
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose label it is found in")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="wan2.1-1.3b", metavar="MODEL", help="of configs/models/, or a YAML file")
    parser.add_argument("--frames", type=int, nargs="+", default=[61, 141], metavar="N", help="of a clip")
    parser.add_argument("--size", type=int, nargs=2, default=[448, 832], metavar=("HEIGHT", "WIDTH"), help="of a clip")
    parser.add_argument("--methods", **_SEVERAL, help="as `vmonarch compare` takes them (default: full vmonarch)")


def _parallel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks", nargs="+", type=int, metavar="N", help="numbers of processes, 1 among them (default: 1, 2, 4 …)"
    )
    parser.add_argument("--cases", nargs="*", metavar="LABEL", help="of attention (default: all; none: no attention)")
    parser.add_argument("--models", nargs="*", metavar="SETTING", help="of `vmonarch bench e2e` (none: no model)")
    parser.add_argument("--modes", **_SEVERAL, help="of models: eager, compiled (default: both)")


def words(values: Sequence[str]) -> list[str]:
    """Names separated by blanks or commas."""
    return [name for value in values for name in value.split(",") if name]


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
    from vmonarch.eval.bench.runner import distinct

    dims = [int(word) if word.isdecimal() else 0 for word in words(values)]
    if not dims or not all(1 <= dim <= 256 for dim in dims):
        raise InputError("head_dims", f"must be integers from 1 to 256, got {', '.join(words(values)) or 'none'}")
    distinct("head_dims", [str(dim) for dim in dims])
    return tuple(dims)


def _kernels(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.eval.bench import kernels
    from vmonarch.eval.bench.runner import choose, distinct, run_bench, wrong_rows

    quick = arguments.quick
    chosen: dict[str, Any] = {}
    if arguments.shapes is not None:
        shapes = tuple(kernels.Shape.parse(word) for word in words(arguments.shapes))
        distinct("shapes", [shape.name for shape in shapes])
        chosen["shapes"] = shapes
    elif quick:
        chosen["shapes"] = tuple(kernels.Shape.parse(name) for name in kernels.QUICK_SHAPES)
    if arguments.methods is not None or quick:
        names = list(kernels.QUICK_METHODS) if arguments.methods is None else words(arguments.methods)
        chosen["methods"] = choose("methods", names, {method.name: method for method in kernels.METHODS})
    if arguments.head_dims is not None:
        chosen["head_dims"] = head_dims(arguments.head_dims)
    elif quick:
        chosen["head_dims"] = (128,)
    if arguments.passes is not None:
        chosen["passes"] = choose("passes", words(arguments.passes), {name: name for name in kernels.PASSES})
    bench = kernels.bench(kernels.Selection(**chosen))
    results = run_bench(bench, methods=bench.methods, say=say, **_common(arguments))
    if not arguments.quiet:
        print(kernels.text_table(results))
    return wrong_rows(results, bench.ours)


def _e2e(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.bench import e2e, e2e_table

    settings = None if arguments.settings is None else words(arguments.settings)
    config = e2e.E2EConfig(
        settings=e2e.choose_settings(settings, arguments.model, arguments.quick),
        methods=tuple(
            resolve_method(name, argument="methods", recipes=True) for name in arguments.methods or ("full", "vmonarch")
        ),
        modes=e2e.MODES if arguments.modes is None else tuple(words(arguments.modes)),
        steps=positive("steps", arguments.steps),
        guidance=arguments.guidance,
        transformer_only=arguments.transformer_only,
        compile_backend=arguments.compile_backend,
        say=say,
        **_common(arguments),
    )
    results = e2e.run_bench(config)
    if not arguments.quiet:
        print(e2e_table.e2e_table(results))
    return e2e.wrong_rows(results)


def _operator(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.eval.bench import runner

    bench = importlib.import_module(f"vmonarch.eval.bench.{arguments.benchmark}").bench()
    methods = bench.methods if arguments.methods is None else words(arguments.methods)
    results = runner.run_bench(bench, methods=methods, cases=arguments.cases, say=say, **_common(arguments))
    return runner.wrong_rows(results, bench.ours)


def _train(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.bench import runner, train

    methods = [resolve_method(name, argument="methods") for name in arguments.methods or train.METHODS]
    bench = train.bench(arguments.model, arguments.frames, arguments.size, methods)
    results = runner.run_bench(bench, methods=bench.methods, say=say, **_common(arguments))
    return runner.wrong_rows(results, bench.ours)


def _parallel(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.eval.bench import parallel

    results = parallel.run_bench(
        ranks=arguments.ranks,
        cases=arguments.cases,
        models=arguments.models,
        modes=parallel.MODES if arguments.modes is None else words(arguments.modes),
        say=say,
        **_common(arguments),
    )
    if not arguments.quiet:
        print(parallel.parallel_table(results))
    return parallel.wrong_rows(results)


def _merge(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    from vmonarch.eval.bench.e2e import merge_files

    merge_files(arguments.parts, arguments.output)
    return []


# By name. The module of a single operator is `vmonarch.eval.bench.NAME`, with a function `bench`.
BENCHES = {
    "kernels": Benchmark(
        "attention alone, against exact attention", _kernels_arguments, _kernels, 15, 540.0, (7, 120.0)
    ),
    "e2e": Benchmark("denoising steps, and seconds per video", _e2e_arguments, _e2e, 5, 540.0, (2, 180.0)),
    "train": Benchmark("training steps, and their memory", _train_arguments, _train, 5, 300.0),
    "parallel": Benchmark("attention and models on several GPUs", _parallel_arguments, _parallel, 5, 540.0),
    "bias": Benchmark("attention with a low-rank bias", _operator_arguments, _operator, 9, 450.0),
    "based": Benchmark("linear and window attention", _operator_arguments, _operator, 9, 280.0),
    "norm": Benchmark("RMS norm and rotary embedding", _operator_arguments, _operator, 9, 240.0),
    "families": Benchmark("transformers beyond Wan", _operator_arguments, _operator, 5, 540.0),
    "sequence": Benchmark("text in the sequence of the video", _operator_arguments, _operator, 7, 240.0),
}


def add_arguments(parser: Parser) -> None:
    """Declare the benchmarks and their arguments."""
    parser.epilog = _EPILOG
    commands = parser.add_commands("benchmark")
    for name, bench in BENCHES.items():
        of = commands.add_parser(name, help=bench.line, description=f"Time {bench.line}.")
        bench.add_arguments(of)
        quick = f", quick {bench.quick[0]}" if bench.quick else ""
        of.add_argument(
            "--rounds", type=int, metavar="N", help=f"measurements of each method (default {bench.rounds}{quick})"
        )
        quick = f", quick {bench.quick[1]:g}" if bench.quick else ""
        of.add_argument(
            "--budget", type=float, metavar="SECONDS", help=f"begin nothing after it (default {bench.budget:g}{quick})"
        )
        if bench.quick:
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


def _common(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all benchmarks take: output, rounds, budget, device and the command as documents show it."""
    from vmonarch.pipelines.environment import shown_command

    bench = BENCHES[arguments.benchmark]
    quick = bench.quick is not None and arguments.quick
    rounds, budget = bench.quick if quick and bench.quick else (bench.rounds, bench.budget)
    return {
        "output": arguments.output,
        "rounds": positive("rounds", rounds if arguments.rounds is None else arguments.rounds),
        "budget": positive("budget", budget if arguments.budget is None else arguments.budget),
        "device": arguments.device,
        "command": shown_command(("vmonarch",), arguments.words),
    }


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print the table.

    Raises:
        InputError: an argument cannot be used.
        WrongResultError: a result is wrong, or one of VMonarch is missing.
    """
    from vmonarch.eval.bench.gate import WrongResultError

    if arguments.output is None:
        arguments.output = Path(f"outputs/bench/{arguments.benchmark}.json")
    started = time.monotonic()

    def say(text: str) -> None:
        if not arguments.quiet:
            print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    wrong = (_merge if arguments.benchmark == "merge" else BENCHES[arguments.benchmark].run)(arguments, say)
    print(arguments.output)
    if wrong:
        raise WrongResultError(f"{len(wrong)} results are wrong or missing: {'; '.join(wrong)}")
