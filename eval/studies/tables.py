"""Write the tables of the documents from the committed JSON: `python -m vmonarch.eval.studies.tables`.

What stands between `<!-- table: NAME -->` and `<!-- end -->` is made of a file in `docs/benchmarks`; TABLES says how,
and of which.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vmonarch.eval import summary
from vmonarch.eval.bench import e2e_table, families, norm, parallel, sequence, tables, train
from vmonarch.eval.compare import format_table
from vmonarch.eval.record import names_now
from vmonarch.eval.render.table import made, markdown, percent, shown_number
from vmonarch.eval.studies import (
    ablations,
    comfyui,
    few_steps,
    finetune_scores,
    gpu_sizes,
    joint,
    kernel_plots,
    mqar,
    support,
    train_large,
    trained,
)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "docs/api.md",
    "docs/choosing.md",
    "docs/kernels.md",
    "docs/families.md",
    "docs/speed.md",
    "docs/gpu-sizes.md",
    "docs/recipes.md",
    "docs/compose.md",
    "docs/few-steps.md",
    "docs/comfyui.md",
    "docs/based.md",
    "docs/finetuning.md",
    "docs/parallel.md",
    "docs/evaluation.md",
    "docs/ablations.md",
    "docs/lab/ablations.md",
    "docs/lab/based.md",
    "docs/lab/bias.md",
    "docs/lab/footage.md",
    "docs/lab/kernels.md",
    "docs/lab/speed.md",
    "docs/lab/trained.md",
    "finetune/embedded/README.md",
)
# Of studies whose scripts have served and are gone (tag `studies-2026-11`).
STORED = ("float8", "footage", "footage-proxy", "footage-run", "neural-bias", "residual-sharing")
_BLOCK = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def embedded_model_table(results: dict[str, Any]) -> str:
    """Shares of videos that show what the prompts ask for, and their similarity to full attention."""
    names = {
        "full": "full attention",
        "vmonarch": "VMonarch, training-free",
        "based": "Based, after its short finetune",
    }
    rows = [
        [
            names.get(method, method),
            *(percent(scores[key]) for key in ("colour", "shape", "direction", "all")),
            *(shown_number(scores.get(key), digits) for key, digits in (("psnr_db", 2), ("ssim", 3))),
        ]
        for method, scores in results["summary"].items()
    ]
    table = markdown(["", "colour", "shape", "direction", "all three", "PSNR dB", "SSIM"], rows)
    settings = results["settings"]
    about = (
        f"{settings['prompts']} prompts, {settings['num_frames']}×{settings['height']}×{settings['width']},"
        f" {settings['steps']} steps, guidance {settings['guidance_scale']}; "
    )
    return made(results, table, about)


def commands_table(results: dict[str, Any]) -> str:
    """What installing, the demonstrations and `make test` took."""
    rows = [
        ["making the environment" if key == "install" else f"`make {key}` after that", f"{seconds:.0f} s"]
        for key, seconds in results["seconds"].items()
    ]
    return made(results, markdown(["", "time"], rows))


def demo_table(results: dict[str, Any]) -> str:
    """The table that `make demo` prints."""
    environment = results["environment"]
    table = format_table(results["methods"], results["means"], results["reference"])
    about = f"{environment['device_name']}, {environment['cpu_count']} cores, {results['created'][:10]}."
    return f"{table}\n\n{about} Made by `make demo`.\n"


def kernel_log_table(results: dict[str, Any]) -> str:
    """What was tried for the kernels, what was expected and what was seen."""
    parts = []
    for section in results["sections"]:
        rows = [[entry[key] for key in ("what", "expected", "seen")] for entry in section["entries"]]
        lines = [["what", "expected", "seen"], ["---"] * 3, *rows]
        parts.append(f"{section['about']}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(parts) + f"\n{results['hardware']}, {results['versions']}.\n"


def stored_table(results: dict[str, Any]) -> str:
    """What a study that is gone has left in its JSON: `tables` of cells, and a `caption` with where they come from."""
    parts = [markdown(part["header"], part["rows"]) for part in results["tables"]]
    return "\n".join([*parts, f"{results['caption']}\n"])


def fidelity_table(results: dict[str, Any]) -> str:
    """VMonarch beside full attention, on both models: what a first reader wants to know."""
    evaluations = {
        "embedded": results["evaluations"]["embedded-refresh-plans"],
        "proxy": results["evaluations"]["proxy-refresh"],
    }
    rows = []
    for method, name in {"full": "full attention", **e2e_table.VIDEO_METHODS}.items():
        line = [name]
        for evaluation in evaluations.values():
            numbers = evaluation["statistics"][method]
            psnr = shown_number(None if method == "full" else numbers["psnr"]["mean"])
            line += [percent(evaluation["attention_flops"][method]), psnr, percent(numbers["prompt_score"]["mean"])]
        rows.append(line)
    columns = ("attention FLOPs", "PSNR dB", "prompt score")
    table = markdown(["", *(f"{model}: {column}" for model in evaluations for column in columns)], rows)
    about = [
        f"{summary.sampled(evaluation['config'])}; {evaluation['environments'][0]['environment']['device_name']},"
        f" {evaluation['created'][:10]}."
        f" Made by `{evaluation['command']}`."
        for evaluation in evaluations.values()
    ]
    return "\n".join([table, *about, ""])


class Table(NamedTuple):
    """A table of the documents.

    Args:
        make: its text, of what the JSON holds.
        source: the JSON's name in `docs/benchmarks`.
    """

    make: Callable[[dict[str, Any]], str]
    source: str


def _ablation(source: str, name: str) -> Table:
    """Of one of the evaluations that `vmonarch.eval.studies.collect` put together."""
    return Table(functools.partial(ablations.ablation_table, name=name), source)


TABLES = {
    "embedded-model": Table(embedded_model_table, "embedded-model"),
    "demo": Table(demo_table, "demo"),
    "commands": Table(commands_table, "commands"),
    "kernels-h200": Table(kernel_plots.kernels_table, "kernels-h200"),
    "speed": Table(kernel_plots.speed_table, "kernels-h200"),
    "kernel-log": Table(kernel_log_table, "kernel-log"),
    "flash-bias-h200": Table(tables.flash_bias_table, "flash-bias-h200"),
    "based-h200": Table(tables.based_table, "based-h200"),
    "based-embedded": Table(embedded_model_table, "based-embedded"),
    "mqar": Table(mqar.mqar_table, "mqar"),
    "train-h200": Table(train.train_table, "train-h200"),
    "e2e": Table(e2e_table.e2e_table, "e2e"),
    "video": Table(e2e_table.video_table, "e2e"),
    "stack": Table(e2e_table.stack_table, "stack"),
    "stack-fidelity": _ablation("eval-stack", "stack"),
    "few-steps": Table(few_steps.few_steps_table, "few-steps"),
    "few-steps-plan": Table(few_steps.few_steps_table, "few-steps-plan"),
    "few-steps-speed": Table(e2e_table.stack_table, "few-steps-e2e"),
    "gpu-fits": Table(gpu_sizes.fits_table, "e2e"),
    "gpu-memory": Table(gpu_sizes.memory_table, "e2e"),
    "gpu-others": Table(gpu_sizes.others_table, "e2e"),
    "norm": Table(norm.norm_table, "norm"),
    "families": Table(families.families_table, "families"),
    "sequence": Table(sequence.sequence_table, "sequence"),
    "joint": Table(joint.joint_table, "joint"),
    "support": Table(support.support_table, "support"),
    "fidelity": Table(fidelity_table, "eval-refresh"),
    "finetune-embedded": Table(finetune_scores.finetune_table, "finetune-embedded"),
    "finetune-embedded-1500": Table(finetune_scores.finetune_table, "finetune-embedded-1500"),
    "finetune-recipe": Table(finetune_scores.finetune_table, "finetune-recipe"),
    "train-14b": Table(train_large.table, "train-14b"),
    "train-lora-1.3b": Table(train_large.table, "train-lora-1.3b"),
    "trained-embedded": Table(trained.table, "trained-embedded"),
    "trained-proxy": Table(trained.table, "trained-proxy"),
    "trained-proxy-second": Table(trained.table, "trained-proxy-second"),
    "trained-tries": Table(trained.table, "trained-tries"),
    "trained-tries-plans": Table(trained.table, "trained-tries-plans"),
    "eval-demo": Table(summary.evaluation_table, "eval-demo"),
    "parallel": Table(parallel.parallel_table, "parallel"),
    "parallel-compiled": Table(parallel.parallel_table, "parallel-compiled"),
    **{
        f"{model}-{name}": _ablation(f"eval-{model}", name)
        for model in ablations.MODELS
        for name in ("table2", "table5", "figure12", "exact", "work", "plans")
    },
    **{
        name: _ablation("eval-refresh", name)
        for name in (
            *("proxy-refresh", "proxy-refresh-20", "embedded-refresh", "embedded-refresh-20"),
            *("embedded-refresh-plans", "embedded-schedules"),
        )
    },
    **{
        name: _ablation("eval-two-resolution", name)
        for name in ("proxy-two-resolution", "proxy-mixed-plans", "embedded-refresh-two-resolution")
    },
    "comfyui": Table(comfyui.study_table, "comfyui"),
    **{name: Table(stored_table, name) for name in STORED},
}


def render(text: str, benchmarks: Path) -> str:
    """`text` with every table written anew.

    Raises:
        KeyError: no such table.
        FileNotFoundError: a table's JSON is missing.
    """

    def table(match: re.Match[str]) -> str:
        made = TABLES[match["name"]]
        text = made.make(names_now(json.loads((benchmarks / f"{made.source}.json").read_text())))
        return match[1] + text + match[3]

    return _BLOCK.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if `--check` finds a document that differs from its JSON."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.studies.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a document is out of date")
    options = parser.parse_args(arguments)
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        old = path.read_text()
        new = render(old, ROOT / "docs" / "benchmarks")
        if new != old:
            stale.append(name)
            if not options.check:
                path.write_text(new)
    if stale:
        print(f"{'out of date' if options.check else 'written'}: {', '.join(stale)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
