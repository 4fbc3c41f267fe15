"""One loop that trains VAE, transformer and Based of the embedded model, and the options of their commands.

The loop of `vmonarch.finetune.trainer` promises that a resumed run takes the same steps as one that was not ended. This
one takes as many steps as fit into a time limit, on data that lie on the device.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from vmonarch.finetune.embedded import parallel

Settings = TypeVar("Settings")


def train(
    stage: str,
    parameters: Iterable[torch.nn.Parameter],
    average: Iterable[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    losses: Callable[[int], dict[str, torch.Tensor]],
    *,
    steps: int,
    rate: Callable[[int, float], float],
    ema: float,
    log: list[dict[str, Any]],
    clip: float = 1.0,
    first: int = 0,
    time_limit: float = math.inf,
    after: Callable[[int, bool], None] = lambda step, last: None,
) -> None:
    """Train `parameters` from step `first` on; inside a process group with the gradients of all processes.

    Args:
        average: moves towards the parameters at every step, by 1 - `ema` (by more in the first steps).
        losses: of a step, scalars by name; "loss" is minimised, the others are only logged.
        rate: learning rate of a step and of the share of the run that is over, in [0, 1).
        log: gets the means over every 100 steps.
        clip: norm that gradients are cut to.
        time_limit: seconds; a run that cannot do all its steps in this time ends earlier.
        after: called after each step with the steps done and whether it was the last.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    parameters, average = list(parameters), list(average)
    started, elapsed, compiling = time.monotonic(), 0.0, 0.0
    recent: list[dict[str, torch.Tensor]] = []
    for step in range(first, steps):
        if parallel.world_size() == 1 or step % 10 == 0 or step == first + 1:
            elapsed = parallel.first_process_says(time.monotonic() - started, str(parameters[0].device))
        if step == first + 1:
            # The first step compiles: time in which nothing is learnt is not to bring the decay nearer.
            compiling = elapsed
        progress = max(step / steps, (elapsed - compiling) / max(time_limit - compiling, 1e-9))
        last = step + 1 == steps or progress >= 1
        found = losses(step)
        found["loss"].backward()
        parallel.average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, progress)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(average, [*parameters], 1 - min(ema, (1 + step) / (10 + step)))
        recent.append({name: value.detach() for name, value in found.items()})
        if (step + 1) % 100 == 0 or last:
            means = {name: torch.stack([entry[name] for entry in recent]).mean().item() for name in found}
            recent.clear()
            if not math.isfinite(means["loss"]):
                raise FloatingPointError(f"the loss is not finite at step {step} of {stage}")
            seconds = time.monotonic() - started
            log.append({"stage": stage, "step": step + 1, **means, "seconds": seconds})
            if parallel.rank() == 0:
                shown = "  ".join(f"{name} {value:.5g}" for name, value in means.items())
                print(f"{stage} {step + 1:6d}  {shown}  {seconds:.0f}s", flush=True)
        after(step + 1, last)
        if last:
            return


def trapezoid(learning_rate: float, warm_up: int, decay_share: float) -> Callable[[int, float], float]:
    """A learning rate that is constant after the warm-up and falls to zero over the last `decay_share` of the run."""
    return lambda step, progress: learning_rate * max(0.0, min(1, (step + 1) / warm_up, (1 - progress) / decay_share))


def autocast(device: str) -> torch.autocast:
    """bfloat16 products, but on the CPU."""
    return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=device != "cpu")


def training_parser(program: str, description: str, defaults: Any) -> argparse.ArgumentParser:
    """A parser with an option for every field of `defaults`, and with those that all training commands have."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="seconds the whole run may take")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    for name, value in vars(defaults).items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            parser.add_argument(option, action="store_true")
        elif isinstance(value, tuple):
            parser.add_argument(option, type=int, nargs=len(value), default=value, help=f"default {value}")
        else:
            parser.add_argument(option, type=type(value), default=value, help=f"default {value}")
    return parser


def read_settings(
    parser: argparse.ArgumentParser, options: Any, defaults: Settings, zeros: Sequence[str], quick: dict[str, int]
) -> Settings:
    """The settings in `options`, with --quick those in `quick` over them; an error if a number is too small.

    Args:
        zeros: names of the settings that may be 0; all other numbers must be positive.
    """
    values = {name: getattr(options, name) for name in vars(defaults)}
    for name, value in values.items():
        if type(value) in (int, float) and (value < 0 or (value == 0 and name not in zeros)):
            least = "at least 0" if name in zeros else "positive"
            parser.error(f"--{name.replace('_', '-')} must be {least}, got {value}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return type(defaults)(**(values | quick if options.quick else values))
