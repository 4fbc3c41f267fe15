"""`vmonarch bench`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_EPILOG = """\
examples:
  vmonarch bench kernels                                  everything, within 8 minutes on an H200
  vmonarch bench kernels --quick --output quick.json      three shapes, d=128, within 2 minutes
  vmonarch bench kernels --shapes 43x28x52 24x44x80:40 --methods cudnn,vmonarch --passes forward
  vmonarch bench e2e --settings 1.3b-61x448x832           seconds per video with a model of random weights
  vmonarch bench e2e --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --settings 81x480x832 --methods full vmonarch-t3

kernels: a shape is frames x height x width of the latent, with 12 heads unless ":heads" follows. Results are compared
with a float32 reference before anything is timed; a wrong one gets no speed-up, and the command ends with exit code 1.

e2e: whole denoising steps of a transformer, in turns, and once VAE and text encoder; a setting is a model and
frames x height x width of its video. What does not fit the budget is left out and named: run settings one by one and
put the files together by `python -m vmonarch.eval.bench.e2e`.
"""

# Of one benchmark only.
_ONLY = {
    "kernels": ("shapes", "head_dims", "passes"),
    "e2e": ("settings", "modes", "model", "steps", "transformer_only", "compile_backend"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch bench`."""
    parser.add_argument(
        "what",
        choices=list(_ONLY),
        metavar="|".join(_ONLY),
        help="kernels: attention alone, against exact attention; e2e: denoising steps, seconds per video",
    )
    several: dict[str, Any] = {"nargs": "+", "metavar": "NAME"}
    kernels = parser.add_argument_group("kernels")
    kernels.add_argument(
        "--shapes", **several, help="latent grids, such as 43x28x52 16x45x80 (default: those of the docs)"
    )
    kernels.add_argument("--head-dims", **several, help="default: 128 64")
    kernels.add_argument("--passes", **several, help="forward, backward (forward and backward together); default: both")
    e2e = parser.add_argument_group("e2e")
    e2e.add_argument("--settings", **several, help="such as 1.3b-61x448x832 (default: the paper's five); see --model")
    e2e.add_argument(
        "--model",
        metavar="MODEL",
        help="in place of the settings' own, which then may be sizes such as 61x448x832: of configs/models/ or a YAML"
        " file (random weights), a folder of a Wan pipeline, or a hub id",
    )
    e2e.add_argument("--modes", **several, help="eager, compiled (default: both)")
    e2e.add_argument("--steps", type=int, metavar="N", help="of a video (default 50)")
    e2e.add_argument("--transformer-only", action="store_true", help="no VAE and no text encoder")
    e2e.add_argument("--compile-backend", metavar="NAME", help="of torch.compile (default inductor)")
    parser.add_argument(
        "--methods",
        **several,
        help="kernels: such as cudnn vmonarch (default: all); e2e: as `vmonarch compare` takes them (default: full"
        " vmonarch); an unknown one lists them",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="measurements of each method (default 15, quick 7; e2e 5, quick 2)"
    )
    parser.add_argument(
        "--budget",
        type=float,
        metavar="SECONDS",
        help="add nothing after this time (default 480, quick 120; e2e 540, quick 180)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="kernels: three shapes, head dimension 128, the main methods; e2e: the first setting",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON, written after every case (default outputs/bench/kernels.json or e2e.json)",
    )
    parser.add_argument(
        "--device", default="cuda", metavar="DEVICE", help="cuda (default), cuda:N; cpu with TRITON_INTERPRET=1"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress; print the path only")
    parser.epilog = _EPILOG


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

    dims = [int(word) if word.isdecimal() else 0 for word in words(values)]
    if not dims or not all(1 <= dim <= 256 for dim in dims):
        raise InputError("head_dims", f"must be integers from 1 to 256, got {', '.join(words(values)) or 'none'}")
    if len(set(dims)) < len(dims):
        raise InputError("head_dims", f"must differ from each other, got {', '.join(map(str, dims))}")
    return tuple(dims)


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print the table.

    Raises:
        InputError: an argument cannot be used.
        WrongResultError: a kernel gave a wrong result or did not run, or a compiled model gave a wrong result.
    """
    from vmonarch.configs import InputError
    from vmonarch.eval.bench.gate import WrongResultError

    for what, names in _ONLY.items():
        for name in names:
            if what != arguments.what and getattr(arguments, name) not in (None, False):
                raise InputError(name, f"is only for `vmonarch bench {what}`")
    if arguments.output is None:
        arguments.output = Path(f"outputs/bench/{arguments.what}.json")
    wrong = (_kernels if arguments.what == "kernels" else _e2e)(arguments)
    if wrong:
        raise WrongResultError(f"{len(wrong)} results are wrong or missing: {'; '.join(wrong)}")


def _e2e(arguments: argparse.Namespace) -> list[str]:
    """Measure whole steps; what is wrong."""
    from vmonarch.configs.methods import resolve_method
    from vmonarch.eval.bench import e2e as bench
    from vmonarch.pipelines.environment import shown_command

    quick = arguments.quick
    standard = bench.QUICK_SECONDS if quick else bench.SECONDS
    settings = None if arguments.settings is None else words(arguments.settings)
    config = bench.E2EConfig(
        output=arguments.output,
        settings=bench.choose_settings(settings, arguments.model, quick),
        methods=tuple(resolve_method(name, argument="methods") for name in arguments.methods or ("full", "vmonarch")),
        modes=bench.MODES if arguments.modes is None else tuple(words(arguments.modes)),
        rounds=positive("rounds", (2 if quick else 5) if arguments.rounds is None else arguments.rounds),
        steps=positive("steps", 50 if arguments.steps is None else arguments.steps),
        budget=positive("budget", standard if arguments.budget is None else arguments.budget),
        transformer_only=arguments.transformer_only,
        compile_backend=arguments.compile_backend or "inductor",
        device=arguments.device,
        command=shown_command(("vmonarch",), None),
        progress=not arguments.quiet,
    )
    results = bench.run_bench(config)
    if not arguments.quiet:
        print(bench.e2e_table(results))
    print(arguments.output)
    return bench.wrong_rows(results)


def _kernels(arguments: argparse.Namespace) -> list[str]:
    """Measure attention alone; what is wrong or missing."""
    from vmonarch.configs import InputError
    from vmonarch.eval.bench import kernels as bench
    from vmonarch.pipelines.environment import shown_command

    quick = arguments.quick
    methods = {method.name: method for method in bench.METHODS}
    chosen: dict[str, Any] = {}
    if arguments.shapes is not None:
        shapes = tuple(bench.Shape.parse(word) for word in words(arguments.shapes))
        if not shapes or len(set(shapes)) < len(shapes):
            raise InputError("shapes", f"must be one or several different ones, got {' '.join(arguments.shapes)}")
        chosen["shapes"] = shapes
    elif quick:
        chosen["shapes"] = tuple(bench.Shape.parse(name) for name in bench.QUICK_SHAPES)
    if arguments.methods is not None or quick:
        names = list(bench.QUICK_METHODS) if arguments.methods is None else words(arguments.methods)
        chosen["methods"] = bench.choose("methods", names, methods)
    if arguments.head_dims is not None:
        chosen["head_dims"] = head_dims(arguments.head_dims)
    elif quick:
        chosen["head_dims"] = (128,)
    if arguments.passes is not None:
        chosen["passes"] = bench.choose("passes", words(arguments.passes), {name: name for name in bench.PASSES})
    chosen["rounds"] = positive("rounds", (7 if quick else 15) if arguments.rounds is None else arguments.rounds)
    standard = bench.QUICK_SECONDS if quick else bench.FULL_SECONDS
    chosen["budget"] = positive("budget", standard if arguments.budget is None else arguments.budget)
    config = bench.BenchConfig(
        output=arguments.output,
        device=arguments.device,
        command=shown_command(("vmonarch",), None),
        progress=not arguments.quiet,
        **chosen,
    )
    results = bench.run_bench(config)
    if not arguments.quiet:
        print(bench.text_table(results))
    print(arguments.output)
    return bench.wrong_rows(results)
