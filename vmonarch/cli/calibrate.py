"""`vmonarch calibrate`.

examples:
  vmonarch calibrate "a red circle moving right over a dark background"
  vmonarch calibrate --prompt-file prompts.txt --flops 1.35 --refine 4
  vmonarch calibrate --diagnosis outputs/calibrate/0001-…/diagnosis.json --flops 0.7 --plan plan.json
  vmonarch compare "…" --methods full vmonarch vmonarch:plan=plan.json

Without --flops and --time the plan does as much work as VMonarch with its defaults.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vmonarch.cli.parser import add_options
from vmonarch.cli.sampling import add_sampling_arguments, sampling_config
from vmonarch.configs import InputError, build
from vmonarch.eval.calibrate.settings import Budget, CalibrateConfig

if TYPE_CHECKING:
    from vmonarch.plan import AttentionPlan

_BUDGET = ("flops", "time", "measure")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch calibrate`."""
    add_sampling_arguments(parser, group="calibrate")
    add_options(parser, CalibrateConfig, "candidates", "every", "sensitivity", "refine", *_BUDGET)
    about = "make another plan from this one, of all its candidates or of --candidates; nothing is sampled"
    parser.add_argument("--diagnosis", metavar="FILE", help=about)
    about = "where the plan goes with --diagnosis (default: plan.json beside)"
    parser.add_argument("--plan", metavar="FILE", help=about)


def run(arguments: argparse.Namespace) -> None:
    """Diagnose, plan, and print where the files are.

    Raises:
        InputError, ModelError: see `vmonarch.eval.calibrate.run.calibrate`.
    """
    from vmonarch.eval.calibrate.run import calibrate
    from vmonarch.pipelines.processes import check_alone

    check_alone()
    if arguments.diagnosis is not None:
        _plan_again(arguments)
        return
    if arguments.plan is not None:
        raise InputError("plan", "is for --diagnosis; otherwise the plan lies in the output folder")
    config = sampling_config(CalibrateConfig, arguments)
    made = calibrate(config, progress=not arguments.quiet)
    if not arguments.quiet:
        _tell(made.plan)
    for name in ("report.html", "diagnosis.json", "plan.json"):
        print(made.folder / name)


def _plan_again(arguments: argparse.Namespace) -> None:
    """Make another plan of a diagnosis."""
    from vmonarch.eval.calibrate.planning import plan
    from vmonarch.eval.calibrate.run import read_diagnosis, warn_if_full

    for name in ("prompts", "refine"):
        if getattr(arguments, name):
            raise InputError(name, "must not be given with --diagnosis, which runs no model")
    budget = build(Budget, {name: getattr(arguments, name) for name in _BUDGET})
    made = plan(read_diagnosis(arguments.diagnosis, arguments.candidates), budget)
    path = Path(arguments.plan or Path(arguments.diagnosis).with_name("plan.json")).expanduser()
    if path.exists():
        raise InputError("plan", f"{str(path)!r} exists; give another --plan")
    made.save(path)
    warn_if_full(made)
    if not arguments.quiet:
        _tell(made)
    print(path)


def _tell(plan: AttentionPlan) -> None:
    predicted = plan.about["predicted"]
    heads = ", ".join(f"{count} × {name}" for name, count in plan.about["heads"].items())
    print(f"heads: {heads}")
    print(
        f"work: {100 * predicted['flops_of_full']:.1f} % of full attention, {predicted['flops_of_vmonarch']:.2f} × "
        f"default VMonarch; predicted mean error {predicted['mean_error']:.4f}, row-KL {predicted['mean_kl']:.4f}"
    )
    if errors := plan.about.get("in_place"):
        best, first = (100 * error**0.5 for error in (min(errors), errors[0]))
        print(f"change of the model's output, measured in place: {best:.2f} % (first plan: {first:.2f} %)")
    if "time_of_full" in predicted:
        print(f"time: {100 * predicted['time_of_full']:.1f} % of full attention's, as measured head by head")
