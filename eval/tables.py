"""Write the tables of the documents from the committed JSON: `python -m vmonarch.eval.tables`.

What stands between `<!-- table: NAME -->` and `<!-- end -->` comes from `docs/benchmarks/NAME.json`, or from the file
that SOURCES names.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (
    "README.md",
    "docs/kernels.md",
    "docs/speed.md",
    "docs/compose.md",
    "docs/bias.md",
    "docs/based.md",
    "docs/finetuning.md",
    "docs/parallel.md",
    "docs/evaluation.md",
    "docs/ablations.md",
    "finetune/embedded/README.md",
)
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table, all columns but the first aligned to the right."""
    lines = [heading, ["---", *("---:" for _ in heading[1:])], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def aligned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`markdown` with columns of one width, for terminals; no line break at the end."""
    widths = [max(map(len, column)) for column in zip(heading, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    pad = lambda row: [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [pad(heading), rule, *map(pad, rows)])


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


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
            *(_percent(scores[key]) for key in ("colour", "shape", "direction", "all")),
            *(f"{scores[key]:.{digits}f}" if key in scores else "–" for key, digits in (("psnr_db", 2), ("ssim", 3))),
        ]
        for method, scores in results["summary"].items()
    ]
    table = markdown(["", "colour", "shape", "direction", "all three", "PSNR dB", "SSIM"], rows)
    settings = results["settings"]
    about = (
        f"{settings['prompts']} prompts, {settings['num_frames']}×{settings['height']}×{settings['width']},"
        f" {settings['steps']} steps, guidance {settings['guidance_scale']}; {results['hardware']}, {results['date']}."
    )
    return f"{table}\n{about} Made by `{results['command']}`.\n"


def commands_table(results: dict[str, Any]) -> str:
    """What installing, the demonstrations and `make test` took."""
    rows = [
        ["making the environment" if key == "install" else f"`make {key}` after that", f"{seconds:.0f} s"]
        for key, seconds in results["seconds"].items()
    ]
    return (
        f"{markdown(['', 'time'], rows)}\n{results['hardware']}, {results['date']}. Made by `{results['command']}`.\n"
    )


def demo_table(results: dict[str, Any]) -> str:
    """The table that `make demo` prints."""
    from vmonarch.eval.compare import format_table

    environment = results["environment"]
    table = format_table(results["methods"], results["means"], results["reference"])
    about = f"{environment['device_name']}, {environment['cpu_count']} cores, {results['created'][:10]}."
    return f"{table}\n\n{about} Made by `make demo`.\n"


def kernels_table(results: dict[str, Any]) -> str:
    """Times of the attention kernels, their memory and their stages."""
    from vmonarch.eval import kernel_plots

    return kernel_plots.kernels_table(results)


def speed_table(results: dict[str, Any]) -> str:
    """Attention by cuDNN and by VMonarch, head dimension 128: what a first reader wants to know."""
    from vmonarch.eval import kernel_plots

    return kernel_plots.speed_table(results)


def kernel_log_table(results: dict[str, Any]) -> str:
    """What was tried for the kernels, what was expected and what was seen."""
    parts = []
    for section in results["sections"]:
        rows = [[entry[key] for key in ("what", "expected", "seen")] for entry in section["entries"]]
        lines = [["what", "expected", "seen"], ["---"] * 3, *rows]
        parts.append(f"{section['about']}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))
    return "\n".join(parts) + f"\n{results['hardware']}, {results['versions']}.\n"


def neural_bias_table(results: dict[str, Any]) -> str:
    """How close two networks come to biases without factors."""
    rows = [
        [name, *(_percent(record[f"relative_error{kind}"]) for kind in ("", "_of_svd", "_of_a_constant"))]
        for name, record in results["biases"].items()
    ]
    settings = results["settings"]
    table = markdown(["bias", "two networks", "SVD of the matrix", "a constant"], rows)
    about = (
        f"Relative error (Frobenius norm) on {settings['fresh_points']} points that were not trained on, rank"
        f" {settings['rank']}; {results['hardware']}, {results['date']}."
    )
    return f"{table}\n{about} Made by `{results['command']}`.\n"


def flash_bias_table(results: dict[str, Any]) -> str:
    """Attention with a low-rank bias beside other ways to have it."""
    from vmonarch.eval import op_tables

    return op_tables.flash_bias_table(results)


def based_table(results: dict[str, Any]) -> str:
    """Linear and window attention beside exact attention."""
    from vmonarch.eval import op_tables

    return op_tables.based_table(results)


def mqar_table(results: dict[str, Any]) -> str:
    """What small models recall, by their mixers and the state they keep."""
    from vmonarch.eval import mqar

    return mqar.mqar_table(results)


def train_table(results: dict[str, Any]) -> str:
    """A training step with VMonarch and with full attention."""
    from vmonarch.eval import train_bench

    return train_bench.train_table(results)


def e2e_table(results: dict[str, Any]) -> str:
    """Seconds per denoising step and per video."""
    from vmonarch.eval import e2e_bench

    return e2e_bench.e2e_table(results)


def video_table(results: dict[str, Any]) -> str:
    """Seconds per video."""
    from vmonarch.eval import e2e_bench

    return e2e_bench.video_table(results)


def quality_table(results: dict[str, Any]) -> str:
    """VMonarch and plans beside full attention: what a first reader wants to know."""
    evaluation = results["evaluations"]["plans"]
    rows = []
    for label in ("full", "vmonarch", "plan 0.75", "plan 1.00", "plan 1.35"):
        numbers = evaluation["statistics"][label]
        name = {"full": "full attention", "vmonarch": "VMonarch with its defaults"}.get(label, f"VMonarch, {label}")
        cells = [
            f"{numbers[key]['mean']:.{digits}f}" if label != "full" else "–"
            for key, digits in (("psnr", 1), ("ssim", 3))
        ]
        rows.append(
            [name, _percent(evaluation["attention_flops"][label]), *cells, _percent(numbers["prompt_score"]["mean"])]
        )
    about = (
        f"{len(evaluation['config']['prompts'])} prompts × {len(evaluation['config']['seeds'])} seeds; "
        f"{evaluation['environments'][0]['environment']['device_name']}, {evaluation['created'][:10]}."
    )
    table = markdown(["", "attention FLOPs", "PSNR dB", "SSIM", "prompt score"], rows)
    return f"{table}\n{about} Made by `{evaluation['command']}`.\n"


def norm_table(results: dict[str, Any]) -> str:
    """RMS norm and rotary embedding in one kernel beside diffusers' code."""
    from vmonarch.eval import norm_bench

    return norm_bench.norm_table(results)


def guidance_table(results: dict[str, Any]) -> str:
    """A step with guidance in two calls and in one, eager, compiled and with CUDA graphs."""
    from vmonarch.eval import guidance_bench

    return guidance_bench.guidance_table(results)


def finetune_table(results: dict[str, Any]) -> str:
    """The embedded model finetuned to one method after the other."""
    from vmonarch.eval import finetune_scores

    return finetune_scores.finetune_table(results)


def evaluation_table(results: dict[str, Any]) -> str:
    """Methods against full attention, with their FLOPs."""
    from vmonarch.eval import evaluate

    return evaluate.evaluation_table(results)


def footage_table(results: dict[str, Any]) -> str:
    """One denoising step of real clips with one method after the other."""
    from vmonarch.eval import footage

    return footage.footage_table(results)


def footage_run_table(results: dict[str, Any]) -> str:
    """Runs along real clips with one method after the other."""
    from vmonarch.eval.studies import footage_run

    return footage_run.footage_run_table(results)


def parallel_table(results: dict[str, Any]) -> str:
    """One video on one and several GPUs, by heads and by frames."""
    from vmonarch.eval import parallel_bench

    return parallel_bench.parallel_table(results)


def float8_table(results: dict[str, Any]) -> str:
    """What float8 in the R-steps would cost in accuracy."""
    from vmonarch.eval import float8

    return float8.float8_table(results)


def parallel_bytes_table(results: dict[str, Any]) -> str:
    """What ranks send for attention by heads and by frames."""
    from vmonarch.eval import parallel_bytes

    return parallel_bytes.parallel_bytes_table(results)


def _ablations(name: str) -> Callable[[dict[str, Any]], str]:
    """One of the evaluations in a JSON of `vmonarch.eval.collect`."""

    def table(results: dict[str, Any]) -> str:
        from vmonarch.eval import ablations

        return ablations.ablation_table(results, name)

    return table


ABLATED_MODELS = ("embedded", "proxy")
_ABLATIONS = {
    f"{model}-{name}": (f"eval-{model}", _ablations(name))
    for model in ABLATED_MODELS
    for name in ("table2", "table5", "figure12", "exact", "work", "plans")
} | {name: ("eval-refresh", _ablations(name)) for name in ("proxy-refresh", "proxy-refresh-20")}
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "embedded-model": embedded_model_table,
    "demo": demo_table,
    "commands": commands_table,
    "kernels-h200": kernels_table,
    "speed": speed_table,
    "kernel-log": kernel_log_table,
    "neural-bias": neural_bias_table,
    "flash-bias-h200": flash_bias_table,
    "based-h200": based_table,
    "based-embedded": embedded_model_table,
    "mqar": mqar_table,
    "train-h200": train_table,
    "e2e": e2e_table,
    "video": video_table,
    "norm": norm_table,
    "float8": float8_table,
    "quality": quality_table,
    "guidance": guidance_table,
    "finetune-embedded": finetune_table,
    "finetune-embedded-1500": finetune_table,
    "finetune-embedded-distilled": finetune_table,
    "footage": footage_table,
    "footage-proxy": footage_table,
    "footage-run": footage_run_table,
    "eval-demo": evaluation_table,
    "parallel": parallel_table,
    "parallel-compiled": parallel_table,
    "parallel-bytes": parallel_bytes_table,
    **{name: table for name, (_, table) in _ABLATIONS.items()},
}
# Tables of another name than their JSON.
SOURCES = {
    "speed": "kernels-h200",
    "video": "e2e",
    "quality": "eval-embedded",
    **{name: source for name, (source, _) in _ABLATIONS.items()},
}
# Tables that may wait for their JSON, and what makes that.
AWAITED = {
    "flash-bias-h200": "python -m vmonarch.eval.bias_bench",
    "based-h200": "python -m vmonarch.eval.based_bench",
    "e2e": "vmonarch bench e2e",
    "video": "vmonarch bench e2e",
    "norm": "python -m vmonarch.eval.norm_bench",
    "parallel": "python -m vmonarch.eval.parallel_bench",
    "guidance": "python -m vmonarch.eval.guidance_bench",
}


def source(name: str, benchmarks: Path) -> Path:
    """The JSON that a table is made of."""
    return benchmarks / f"{SOURCES.get(name, name)}.json"


def render(text: str, benchmarks: Path) -> str:
    """`text` with every table written anew.

    Raises:
        KeyError: a table that no function writes.
        FileNotFoundError: a table whose JSON is missing, and that is not AWAITED.
    """

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        path = source(name, benchmarks)
        if name in AWAITED and not path.exists():
            text = f"Not measured yet: `{AWAITED[name]} --output docs/benchmarks/{path.name}`.\n"
        else:
            text = TABLES[name](json.loads(path.read_text()))
        return match[1] + text + match[3]

    return _BLOCK.sub(table, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 if `--check` finds a document that differs from its JSON."""
    parser = argparse.ArgumentParser(prog="python -m vmonarch.eval.tables", description=__doc__)
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
