"""Whole runs along real footage: `python -m vmonarch.eval.studies.footage_run`.

What a method keeps from one step to the next cannot be measured in one call (`footage.py` beside this). Here a pipeline
runs through all of its steps, but its scheduler leads it along the straight path from noise to a clip,
x = (1 - σ)·clip + σ·noise, whatever the transformer predicts. So all methods see the same inputs, and in every step
the velocity's relative error to that of full attention tells what attention alone changes. The text is empty.

Legend: latents are [1, C, T, h, w].
"""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vmonarch.eval.attention_flops import recorded_call, relative_flops, transformers_by_step
from vmonarch.eval.render.table import made, markdown, percent
from vmonarch.eval.studies.footage import (
    Footage,
    check_methods,
    noise_like,
    open_model,
    read_footage,
    relative_error,
    run_script,
)
from vmonarch.finetune.data.decode import ClipShape

METHODS = (
    "full",
    "vmonarch",
    "vmonarch-dense-start",
    "fast",
    "near-lossless",
    "vmonarch-plain:num_iterations=1",
    "vmonarch:coarse=2,refresh=0.16",
    "two-resolution:refresh=0.16",
    "block-topk:refresh=0.16",
    "local:refresh=0.16",
    "reuse:refresh=0.32",
)
# Of the embedded model.
PLANS = ("vmonarch:plan=embedded-1.00", "vmonarch:plan=embedded-1.35", "vmonarch:plan=embedded-0.67,refresh=0.16")
QUARTERS = ("first", "second", "third", "last")


@contextmanager
def led(pipe: Any, footage: Footage, noise: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Within the block the pipeline's steps end on the clip's path; gives the velocities that it predicted."""
    own, velocities = pipe.scheduler, []
    scheduler = copy.deepcopy(own)

    def step(velocity: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor]:
        velocities.append(velocity.float())
        return (on_path(footage, noise, float(scheduler.sigmas[len(velocities)])),)

    scheduler.step = step
    pipe.scheduler = scheduler
    try:
        yield velocities
    finally:
        pipe.scheduler = own


def on_path(footage: Footage, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """The clip's latents with noise of this level."""
    return (1 - sigma) * footage.latents + sigma * noise


def velocities_of_run(
    pipe: Any, footage: Footage, noise: torch.Tensor, text: torch.Tensor, shape: ClipShape, steps: int
) -> list[torch.Tensor]:
    """What the pipeline predicts in each of its steps along the clip's path; no guidance.

    Args:
        noise: like the clip's latents. text: [1, L, D].
    """
    with led(pipe, footage, noise) as velocities:
        pipe.scheduler.set_timesteps(steps, device=noise.device)
        pipe(
            prompt_embeds=text,
            guidance_scale=1.0,
            num_inference_steps=steps,
            latents=on_path(footage, noise, float(pipe.scheduler.sigmas[0])),
            height=shape.height,
            width=shape.width,
            num_frames=shape.num_frames,
            output_type="latent",
        )
    return velocities


def run(
    *, model: str, clips: Sequence[Path], methods: Sequence[str], steps: int, seed: int, device: str
) -> dict[str, Any]:
    """Measure all methods on all clips; the first one is the reference.

    Returns:
        {"model", "settings", "methods": [{"label", "attention_flops_share"}], "clips", "results": [{"clip", "method",
        "velocity_errors": one for each step}]}.

    Raises:
        InputError: an argument that cannot be used.
        ModelError: no such model.
    """
    chosen = check_methods(methods, one_call=False)
    name, pipe, shape, text = open_model(model, device)
    pipe.set_progress_bar_config(disable=True)
    results = []
    for number, path in enumerate(clips):
        footage = read_footage(path, shape, pipe.vae, text.device)
        noise = noise_like(footage, seed + number)
        expected: list[torch.Tensor] = []
        for method in chosen:
            method.install(pipe)
            with recorded_call(pipe) as call:
                found = velocities_of_run(pipe, footage, noise, text, shape, steps)
            expected = expected or found
            errors = [relative_error(*pair) for pair in zip(found, expected, strict=True)]
            results.append({"clip": footage.name, "method": method.label, "velocity_errors": errors})
        print(f"{footage.name}: {len(chosen)} methods", flush=True)
    shares = relative_flops(call, chosen, transformers_by_step(pipe, steps))
    return {
        "model": name,
        "settings": {
            "height": shape.height,
            "width": shape.width,
            "num_frames": shape.num_frames,
            "steps": steps,
            "seed": seed,
            "dtype": str(pipe.transformer.dtype),
        },
        "methods": [{"label": label, "attention_flops_share": share} for label, share in shares.items()],
        "clips": [path.stem for path in clips],
        "results": results,
    }


def footage_run_table(document: dict[str, Any]) -> str:
    """Means over the clips of the velocity's error: over the whole run, and over each quarter of it."""
    steps = document["settings"]["steps"]
    bounds = [round(i * steps / len(QUARTERS)) for i in range(len(QUARTERS) + 1)]
    parts = [slice(0, steps), *(slice(*pair) for pair in zip(bounds, bounds[1:], strict=False))]
    rows = []
    for method in document["methods"][1:]:
        label = method["label"]
        runs = [row["velocity_errors"] for row in document["results"] if row["method"] == label]
        means = [statistics.fmean(error for errors in runs for error in errors[part]) for part in parts]
        rows.append([label, percent(method["attention_flops_share"]), *(f"{100 * mean:.1f}" for mean in means)])
    first, *others = QUARTERS
    heading = ["", "attention FLOPs", "velocity error, %, all steps", f"{first} quarter", *others]
    settings = document["settings"]
    about = (
        f"{', '.join(document['clips'])}; {settings['num_frames']}×{settings['height']}×{settings['width']},"
        f" {steps} steps; model {document['model']}; "
    )
    return made(document, markdown(heading, rows), about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    steps = {"steps": {"type": int, "default": 50}}
    print(footage_run_table(run_script("studies.footage_run", __doc__, run, METHODS, PLANS, steps, arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
