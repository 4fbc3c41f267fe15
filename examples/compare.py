"""Two settings of VMonarch against full attention, same prompt and noise: `python examples/compare.py`."""

import argparse

from vmonarch.eval.evaluate import CompareConfig, evaluate

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--frames", type=int, default=29)
parser.add_argument("--output", default="outputs/compare")
options = parser.parse_args()

config = CompareConfig(
    prompts=("a green ring drifts to the upper left",),
    seeds=(0,),
    methods=("full", "vmonarch", "near-lossless"),  # full attention is the reference
    steps=options.steps,
    num_frames=options.frames,
    output_dir=options.output,
)
comparison = evaluate(config)
print(comparison.table())
print(f"videos side by side: {comparison.folder}")
