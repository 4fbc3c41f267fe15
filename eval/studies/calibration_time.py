"""Time a calibration of models with random weights: `python -m vmonarch.eval.studies.calibration_time --output FILE`.

What `vmonarch calibrate` computes does not depend on what a model has learnt, so that its time and memory can be
measured without weights, text encoder and VAE. One step of one prompt is computed and recorded; with guidance it has
two calls of the transformer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vmonarch import apply, restore
from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.denoiser import TEXT_TOKENS, Denoiser
from vmonarch.eval.bench.e2e import Setting, choose_settings
from vmonarch.eval.calibrate.diagnosis import DiagnosisProcessor, Recorder, document, watched
from vmonarch.eval.calibrate.planning import plan_within_work
from vmonarch.eval.calibrate.run import CANDIDATES
from vmonarch.eval.calibrate.timing import head_times
from vmonarch.eval.record import script_parser, script_record
from vmonarch.eval.render.table import markdown
from vmonarch.eval.wan_models import read_model_config
from vmonarch.files import check_output, write_json

# Of a run, of which the first is computed.
STEPS = 2


def calibration_time(setting: Setting, device: torch.device) -> dict[str, Any]:
    """Seconds of a calibration, of its parts too, and the most memory in bytes (None on a CPU)."""
    model = read_model_config(setting.model)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    latents = model.latents(setting.frames, setting.height, setting.width, argument="settings")
    noise = torch.randn(1, model.transformer["in_channels"], *latents, device=device)
    texts = list(torch.randn(2, 1, TEXT_TOKENS, model.transformer["text_dim"], device=device, dtype=dtype))
    clock = Clock(device)
    pipe = Denoiser(model.build_transformer("transformer", device, dtype), model, noise, texts, STEPS, clock)
    options: dict[str, Any] = {name: resolve_method(name).parameters.options for name in CANDIDATES}  # type: ignore[union-attr]
    recorder = Recorder(options, every=STEPS)
    seconds = {}
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)

    def finished(part: str, start: float) -> None:
        clock.wait()
        seconds[part] = time.monotonic() - start

    begun = time.monotonic()
    apply(pipe, DiagnosisProcessor(recorder))
    try:
        with torch.no_grad(), watched(recorder, pipe):
            pipe.run(range(1))
    finally:
        restore(pipe)
    finished("sampling", begun)
    assert recorder.grid is not None
    start = time.monotonic()
    times = head_times(recorder.inputs, recorder.grid, recorder.candidates)
    finished("times of heads", start)
    start = time.monotonic()
    plan = plan_within_work(document(recorder, times), 1.0)
    finished("plan", start)
    finished("all", begun)
    return {
        "setting": setting.name,
        "video": [setting.frames, setting.height, setting.width],
        "tokens": recorder.grid.tokens,
        "candidates": len(options),
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "heads": plan.about["heads"],
    }


def calibration_table(results: dict[str, Any]) -> str:
    """A line for every setting."""
    rows = [
        [
            case["setting"],
            f"{case['tokens']:,}",
            *(f"{case['seconds'][part]:.0f}" for part in ("sampling", "times of heads", "all")),
            "–" if case["peak_bytes"] is None else f"{case['peak_bytes'] / 1e9:.0f}",
        ]
        for case in results["cases"]
    ]
    return markdown(["setting", "tokens", "sampling, s", "times of heads, s", "all, s", "memory, GB"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.calibration_time", __doc__)
    parser.add_argument("--settings", nargs="+", metavar="NAME", help="as `vmonarch bench e2e` takes them")
    parser.add_argument("--model", help="in place of the settings' own: of configs/models/ or a YAML file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    try:
        check_output(options.output)
        settings = choose_settings(options.settings, options.model)
        record: dict[str, Any] = script_record("studies.calibration_time", arguments, device)
        record |= {"steps": 1, "calls": 2, "prompts": 1, "cases": []}
        for setting in settings:
            record["cases"].append(calibration_time(setting, device))
            # What was measured stays, whatever the next one does.
            write_json(options.output, record)
    except InputError as error:
        parser.error(str(error))
    print(calibration_table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
