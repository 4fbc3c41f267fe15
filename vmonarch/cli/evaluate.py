"""Commands that measure videos: `vmonarch compare`, `eval`, `calibrate` and `vbench`; and the page of `ui`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.cli.arguments import Parser, add_options, given_options, hide_loading_bars
from vmonarch.cli.generate import MACHINE, add_methods, add_sampling, sampling_config
from vmonarch.configs import InputError, build, read_document
from vmonarch.eval.calibrate.settings import Budget, CalibrateConfig
from vmonarch.eval.settings import CompareConfig, EvalConfig, check_names
from vmonarch.eval.vbench import installation, scoring
from vmonarch.files import AtomicFiles, write_json
from vmonarch.pipelines.config import SamplingConfig, read_prompts
from vmonarch.pipelines.environment import shown_command

if TYPE_CHECKING:
    from vmonarch.plan import AttentionPlan

_BUDGET = ("flops", "time", "measure")


def add_compare(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser, group="compare")
    add_methods(parser, "methods", "full near-lossless", "+")
    add_options(parser, CompareConfig, "lpips", "vmaf")


def run_compare(arguments: argparse.Namespace) -> None:
    """the same videos through full attention and other methods, with the numbers

    examples:
      vmonarch compare "a red circle moving right over a dark background"
      vmonarch compare "…" --methods full vmonarch vmonarch-t1 "vmonarch:num_iterations=4,exact=null"
      vmonarch compare --prompt-file prompts.txt --seed 0 1 2 --config exact

    The reference (full attention) always runs, and every method is warmed up before it is timed. PSNR and SSIM are
    measured on float frames, before mp4 encoding.
    """
    from vmonarch.pipelines.processes import check_alone

    check_alone()
    _evaluate(CompareConfig, arguments)


def add_eval(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser, group="eval")
    add_methods(parser, "methods", "full near-lossless", "+")
    add_options(parser, EvalConfig, "baseline", "prompt_set", "num_prompts", "lpips", "vmaf", "vbench", "report_items")


def run_eval(arguments: argparse.Namespace) -> None:
    """methods × prompts × seeds: quality against full attention, statistics, a report

    examples:
      vmonarch eval --config table2
      vmonarch eval --prompt-set embedded --num-prompts 8 --seed 0 1 --methods vmonarch vmonarch-t1 vmonarch-band1
      vmonarch eval --prompt-file prompts.txt --config exact --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers
      accelerate launch --num_processes 8 -m vmonarch eval --config table2

    The folder gets evaluation.json and report.html, a single file with tables, plots and videos. The same
    command continues where it was stopped; several processes share the prompts and seeds.
    """
    _evaluate(EvalConfig, arguments)


def _evaluate(schema: type[EvalConfig], arguments: argparse.Namespace) -> None:
    from vmonarch.eval.evaluate import evaluate

    config = sampling_config(schema, arguments)
    evaluation = evaluate(config, progress=not arguments.quiet, command=shown_command(("vmonarch",), arguments.words))
    if evaluation.record is None:
        print(f"{evaluation.missing} items are missing; the call that finds all of them there writes the report")
        return
    if not arguments.quiet:
        print(evaluation.table())
        print("means over items with 95 % bootstrap intervals, against the reference of the same prompt and seed")
    pictures, results = sorted(evaluation.folder.glob("0*-*")), ("evaluation.json", "report.html")
    print(*pictures, *(evaluation.folder / name for name in results), sep="\n")


def add_calibrate(parser: argparse.ArgumentParser) -> None:
    add_sampling(parser, group="calibrate")
    add_options(parser, CalibrateConfig, "candidates", "every", "sensitivity", "refine", *_BUDGET)
    parser.add_argument("--diagnosis", metavar="FILE", help="make another plan from this one; nothing is sampled")
    parser.add_argument("--plan", metavar="FILE", help="where the plan of --diagnosis goes (default: plan.json beside)")


def run_calibrate(arguments: argparse.Namespace) -> None:
    """what every head loses, and a plan of what every head computes

    examples:
      vmonarch calibrate "a red circle moving right over a dark background"
      vmonarch calibrate --prompt-file prompts.txt --flops 1.35 --refine 4
      vmonarch calibrate --diagnosis outputs/calibrate/0001-…/diagnosis.json --flops 0.7 --plan plan.json
      vmonarch compare "…" --methods full vmonarch vmonarch:plan=plan.json

    Without --flops and --time the plan does as much work as VMonarch with its defaults.
    """
    from vmonarch.eval.calibrate.run import calibrate
    from vmonarch.pipelines.processes import check_alone

    check_alone()
    if arguments.diagnosis is not None:
        plan, *written = _plan_again(arguments)
    elif arguments.plan is not None:
        raise InputError("plan", "is for --diagnosis; otherwise the plan lies in the output folder")
    else:
        made = calibrate(sampling_config(CalibrateConfig, arguments), progress=not arguments.quiet)
        plan, *written = made.plan, made.folder / "diagnosis.json", made.folder / "plan.json"
    if not arguments.quiet:
        predicted = plan.about["predicted"]
        print("heads:", ", ".join(f"{count} × {name}" for name, count in plan.about["heads"].items()))
        print(
            f"work: {100 * predicted['flops_of_full']:.1f} % of full attention, {predicted['flops_of_vmonarch']:.2f} × "
            f"default VMonarch; predicted mean error {predicted['mean_error']:.4f}, row-KL {predicted['mean_kl']:.4f}"
        )
        if "time_of_full" in predicted:
            print(f"time: {100 * predicted['time_of_full']:.1f} % of full attention's, as measured head by head")
    print(*written, sep="\n")


def _plan_again(arguments: argparse.Namespace) -> tuple[AttentionPlan, Path]:
    """Another plan from a diagnosis, and its file."""
    from vmonarch.eval.calibrate.diagnosis import FORMAT
    from vmonarch.eval.calibrate.planning import plan

    for name in ("prompts", "candidates", "refine"):
        if getattr(arguments, name):
            raise InputError(name, "must not be given with --diagnosis, which runs no model")
    budget = build(Budget, {name: getattr(arguments, name) for name in _BUDGET})
    source = Path(arguments.diagnosis).expanduser()
    made = plan(read_document("diagnosis", source, FORMAT, "diagnosis of `vmonarch calibrate`"), budget)
    path = source.with_name("plan.json") if arguments.plan is None else Path(arguments.plan).expanduser()
    if path.exists():
        raise InputError("plan", f"{str(path)!r} exists; give another --plan")
    made.save(path)
    return made, path


def add_ui(parser: argparse.ArgumentParser) -> None:
    add_options(parser, SamplingConfig, "model")
    add_options(parser.add_argument_group("machine"), SamplingConfig, *MACHINE)
    server = parser.add_argument_group("server")
    server.add_argument("--output-dir", metavar="FOLDER", help="default: outputs/ui; the page shows all that is in it")
    server.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="default 127.0.0.1: this machine alone")
    server.add_argument("--port", type=int, metavar="N", default=7860, help="default 7860; 0 for a free one")


def run_ui(arguments: argparse.Namespace) -> None:
    """a web page: from prompts to videos

    examples:
      vmonarch ui
      vmonarch ui --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --offload model
      ssh -L 7860:localhost:7860 gpu-machine vmonarch ui        # then http://localhost:7860 here

    The page needs the extra ui: pip install 'vmonarch[ui]'. It has no password: whoever reaches it can use it.
    """
    try:
        from vmonarch.eval.ui import Studio, is_local, launch
    except ModuleNotFoundError as error:
        raise InputError("ui", f"needs {error.name}: pip install 'vmonarch[ui]'") from error
    hide_loading_bars()
    studio = Studio(**given_options(arguments, "model", "output_dir", *MACHINE))
    page, address = launch(studio, arguments.host, arguments.port)
    if not is_local(arguments.host):
        print(f"vmonarch ui: warning: whoever reaches {arguments.host} can use the page; no password", file=sys.stderr)
    print(f"{address}  (videos in {studio.output}; Ctrl-C ends it)", flush=True)
    try:
        page.block_thread()
    finally:
        for stop in list(studio.stops.values()):
            stop.set()
        page.close(verbose=False)


def add_vbench(parser: Parser) -> None:
    parser.description = f"Score videos by the official package of VBench, version {installation.VERSION}."
    commands = parser.add_commands()
    install = commands.add_parser("install", help="make the environment that VBench runs in (about 6 GB)")
    weights = commands.add_parser("weights", help="download the files that dimensions load, where they are missing")
    prompts = commands.add_parser("prompts", help="write what to generate: prompt, index and seed of every video")
    score = commands.add_parser("score", help="score videos")
    for command, do in ((install, _install), (weights, _weights), (prompts, _prompts), (score, _score)):
        command.set_defaults(do=do)
    install.add_argument("--python", help="interpreter to make it with, 3.10 to 3.12 (default: this one)")
    install.add_argument("--folder", type=Path, help=f"of the environment (default: {installation.default_folder()})")
    about = "other pinned packages, for another torch, say"
    install.add_argument("--requirements", type=Path, default=installation.REQUIREMENTS, help=about)
    paper = scoring.PAPER_DIMENSIONS
    about = f"of {', '.join(scoring.DIMENSIONS)} (default: the five of the VMonarch paper, {', '.join(paper)})"
    for command in (weights, prompts, score):
        command.add_argument("--dimensions", nargs="+", default=list(paper), metavar="DIMENSION", help=about)
    kept: dict[str, Any] = {"type": Path, "metavar": "FOLDER", "help": "default: %(default)s"}
    for command in (weights, score):
        command.add_argument("--weights", default=installation.default_weights(), **kept)
    for command in (prompts, score):
        command.add_argument("--environment", default=installation.default_folder(), **kept)
    prompts.add_argument("--prompt-file", type=Path, help="a prompt per line, instead of VBench's")
    prompts.add_argument("--seed", type=int, default=0, help="first seed; every video has its own (default 0)")
    prompts.add_argument("--output", type=Path, required=True, help="JSON Lines file to write")
    score.add_argument("list", type=Path, help="JSON Lines file of file and prompt, and of dimensions if not of all")
    about = "default 5, as VBench asks"
    prompts.add_argument("--videos-per-prompt", type=int, default=5, metavar="N", help=about)
    score.add_argument("--device", default="auto", help="auto (default: cuda where there is one), cpu, cuda, cuda:N")
    about = "that a dimension may take (default 7200)"
    score.add_argument("--timeout", type=float, default=7200, metavar="SECONDS", help=about)
    about = "of the scores that need not be computed again (default outputs/vbench)"
    score.add_argument("--work-dir", type=Path, default=Path("outputs/vbench"), metavar="FOLDER", help=about)
    score.add_argument("--output", type=Path, required=True, help="JSON to write")


def run_vbench(arguments: argparse.Namespace) -> None:
    """VBench's scores of videos, by the official package

    examples:
      vmonarch vbench install
      vmonarch vbench weights --dimensions imaging_quality dynamic_degree
      vmonarch vbench prompts --dimensions imaging_quality --output prompts.jsonl
      vmonarch vbench score videos.jsonl --dimensions imaging_quality --output scores.json

    videos.jsonl has a line like {"file": "a.mp4", "prompt": "a lighthouse in a storm"} for every video, with a path
    relative to the list. If its lines are those of `prompts`, with a "file" added to each, a dimension only sees the
    videos of its own prompts.
    """
    if hasattr(arguments, "dimensions"):
        check_names("dimensions", arguments.dimensions, scoring.DIMENSIONS)
    if (output := getattr(arguments, "output", None)) is not None:
        if output.exists():
            raise InputError("output", f"{output} exists and is not overwritten")
        output.parent.mkdir(parents=True, exist_ok=True)
    arguments.do(arguments)


def _install(arguments: argparse.Namespace) -> None:
    print("making the environment; this takes minutes", file=sys.stderr)
    print(installation.install(arguments.folder, python=arguments.python, requirements=arguments.requirements))


def _weights(arguments: argparse.Namespace) -> None:
    report = lambda line: print(line, file=sys.stderr)
    installation.download_weights(arguments.dimensions, arguments.weights, report)
    print(arguments.weights)


def _prompts(arguments: argparse.Namespace) -> None:
    own = None if arguments.prompt_file is None else read_prompts(str(arguments.prompt_file))
    number, seed = arguments.videos_per_prompt, arguments.seed
    items = scoring.suite(arguments.dimensions, number, seed, arguments.environment, own)
    with AtomicFiles() as files:
        lines = [json.dumps(item, ensure_ascii=False) + "\n" for item in items]
        files.stage(arguments.output).write_text("".join(lines), encoding="utf-8")
    print(f"{len(items)} videos: {arguments.output}")


def _score(arguments: argparse.Namespace) -> None:
    settings = {key: getattr(arguments, key) for key in ("work_dir", "timeout", "device", "environment", "weights")}
    videos = scoring.read_videos(arguments.list)
    results = {}
    for name, found in scoring.score_videos(videos, arguments.dimensions, **settings, report=print).items():
        rows = zip(found.videos, found.per_video, strict=True)
        listed = [{"file": str(video.path), "prompt": video.prompt, "score": score} for video, score in rows]
        results[name] = {"score": found.score, "videos": listed}
    write_json(arguments.output, {"vbench": installation.VERSION, "dimensions": results})
    print(arguments.output)
