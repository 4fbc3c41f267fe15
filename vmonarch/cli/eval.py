"""`vmonarch eval`.

examples:
  vmonarch eval --config table2
  vmonarch eval --prompt-set embedded --num-prompts 8 --seed 0 1 --methods vmonarch vmonarch-t1 vmonarch-band1
  vmonarch eval --prompt-file prompts.txt --config exact --model /path/to/a/wan/pipeline --output-dir outputs/exact
  accelerate launch --num_processes 8 -m vmonarch eval --config table2

The folder gets evaluation.json, table.md and report.html, a single file with tables, plots and videos. The same command
goes on where it was stopped; several processes share the prompts and seeds out.
"""

from __future__ import annotations

import argparse

from vmonarch.cli.parser import add_options
from vmonarch.cli.sampling import (
    add_method_arguments,
    add_sampling_arguments,
    sampling_config,
)
from vmonarch.eval.settings import EvalConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `vmonarch eval`."""
    add_sampling_arguments(parser, group="eval")
    add_method_arguments(parser)
    add_options(parser, EvalConfig, "baseline", "prompt_set", "num_prompts", "lpips", "vbench", "report_items")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate, print the table and where the report is.

    Raises:
        InputError, ModelError, GenerationError: see `vmonarch.eval.evaluate.evaluate`.
    """
    from vmonarch.eval.evaluate import evaluate
    from vmonarch.pipelines.environment import shown_command

    config = sampling_config(EvalConfig, arguments)
    evaluation = evaluate(config, progress=not arguments.quiet, command=shown_command(("vmonarch",), arguments.words))
    if evaluation.record is None:
        print(f"{evaluation.missing} items are missing; the call that finds all of them there writes the report")
        return
    if not arguments.quiet:
        print(evaluation.table())
        print("means over items with 95 % bootstrap intervals, against the reference of the same prompt and seed")
        print(evaluation.folder / "evaluation.json")
    print(evaluation.folder / "report.html")
