"""A diagnosis that no model was needed for."""

import torch

from vmonarch.eval.calibrate.diagnosis import FORMAT


def made_up(steps=2, layers=3, heads=4, seed=0):
    """A diagnosis whose errors fall with the work of a candidate, differently for every head."""
    generator = torch.Generator().manual_seed(seed)
    names = {"cheap": 0.1, "default": 0.3, "dear": 0.6}
    options = {"cheap": {"num_iterations": 1, "exact": None}, "default": {}, "dear": {"exact": {"band": 1}}}
    scale = torch.rand(steps, layers, heads, generator=generator) + 0.1
    values = {name: (scale * (1 - flops) ** 2).tolist() for name, flops in names.items()}
    return {
        "format": FORMAT,
        "grid": [8, 3, 4],
        "candidates": {name: {"options": options[name], "flops": flops} for name, flops in names.items()},
        "transformers": {
            "transformer": {
                "steps": list(range(steps)), "layers": layers, "heads": heads,
                "candidates": {n: dict.fromkeys(("error", "layer_error", "kl"), v) for n, v in values.items()},
            }
        },
    }  # fmt: skip
