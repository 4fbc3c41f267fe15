"""Measure what VMonarch costs every head, and spend the work where it helps: `python examples/plan.py`.

A plan for a real model should see a dozen prompts or more. This one sees a single prompt, to end in seconds.
"""

import argparse

import diffusers

import vmonarch
from vmonarch.eval.calibrate.run import CalibrateConfig, calibrate
from vmonarch.pipelines.embedded import embedded_model_path

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--frames", type=int, default=29)
parser.add_argument("--output", default="outputs/calibrate")
options = parser.parse_args()

config = CalibrateConfig(
    prompts=("a red circle moving right over a dark background",),
    candidates=("vmonarch-t1", "vmonarch", "vmonarch-band1"),  # what a head may get besides full attention
    flops=1.0,  # as much work as VMonarch with its defaults
    every=max(1, options.steps // 2),
    steps=options.steps,
    num_frames=options.frames,
    output_dir=options.output,
)
made = calibrate(config)
print("heads:", made.plan.about["heads"])
print("diagnosis:", made.folder / "diagnosis.json")

pipe = diffusers.WanPipeline.from_pretrained(embedded_model_path())
vmonarch.apply(pipe, vmonarch.VMonarchProcessor(plan=made.folder / "plan.json"))
size = {"height": 96, "width": 160, "num_frames": options.frames, "num_inference_steps": options.steps}
print("latents:", tuple(pipe("a yellow square moves down", **size, output_type="latent").frames.shape))
