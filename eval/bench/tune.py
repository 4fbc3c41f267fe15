"""Find the kernels' launch options for the chip at hand and write its table: `vmonarch tune`.

Every kernel is a case of a benchmark, and its candidates are the ways: each is the whole operator with these launch
options, at representative shapes. So candidates that do not compile, or give other results than the options in use, are
not timed. Later kernels are tuned with the winners of earlier ones.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import InputError
from vmonarch.eval.bench.kernels import check_head_dims, parse_shape, randn, with_gradients
from vmonarch.eval.bench.machine import check_device, measured_dtype
from vmonarch.eval.bench.runner import Bench, Case, Way, Ways, run_bench
from vmonarch.eval.settings import check_names
from vmonarch.files import AtomicFiles, check_output
from vmonarch.kernels.common import launch
from vmonarch.kernels.common.launch import block_dim, launch_options, launch_overrides
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.pipelines.environment import device_name, package_versions

Options = dict[str, int]

# Largest relative difference (Frobenius norm) that other tile sizes may make to the results of the options in use.
BOUNDS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# If the whole operator gains less than this share, it counts as noise and the options in use stay.
LEAST_GAIN = 0.005
IN_USE = "in use"


@dataclass(frozen=True)
class Sweep:
    """How a kernel is tuned.

    Args:
        shapes: timed together.
        grids: candidates, as products of values by option; new constexpr options are added here. Options that a
            candidate does not name keep their value from the table.
        training: whether the kernel belongs to the backward pass.
        options: arguments of `vmonarch_attention`. ranks: of the bias; where not 0, FlashBias runs in its place.
        hopper: whether the kernel exists only for Hopper.
    """

    shapes: tuple[str, ...]
    grids: tuple[Mapping[str, tuple[int, ...]], ...]
    training: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (0,)
    hopper: bool = False

    def candidates(self) -> dict[str, Options]:
        """All candidates by name, each once; the first is the options in use."""
        found: dict[str, Options] = {IN_USE: {}}
        for grid in self.grids:
            for values in itertools.product(*grid.values()):
                candidate = dict(zip(grid, values, strict=True))
                found[" ".join(f"{key}={value}" for key, value in candidate.items())] = candidate
        return found


# One shape for kernels whose speed depends on the tokens per frame, several where it depends on the number of frames.
_SHAPE = ("43x28x52",)
_L_SHAPES = ("16x28x52", "43x28x52", "81x28x52")
_TILES = {"BLOCK_M": (64, 128), "BLOCK_N": (64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
_HOPPER = {"BLOCK_N": (64, 128), "Q_STAGES": (1, 2, 3), "STAGES": (2, 3, 4, 5)}
# Results of an R-step leave through z's buffer, which is released one tile later: a single stage would deadlock.
_HOPPER_R = ({**_HOPPER, "Q_STAGES": (2, 3)},)
_BACKWARD = (
    {"BLOCK_M": (32, 64), "BLOCK_N": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3)},
    {"BLOCK_M": (128,), "BLOCK_N": (32, 64), "num_warps": (8,), "num_stages": (1, 2, 3)},
)
_BIAS = ("8x32x32",)
_RANKS = (9, 64)
_L = {"MAX_TILE": (64, 128), "MAX_WARPS": (4, 8), "maxnreg": (128, 168, 255)}
# Kernels that write transposed tiles, which Hopper and Blackwell can do by descriptors (TMA).
_L_COLUMNS = ({**_L, "TMA": (0, 1)},)
# More frames than one tile of an L-step holds.
_MANY_FRAMES = ("172x14x26",)

# In order of priority: when the budget is used up, the rest is left out.
SWEEPS: dict[str, Sweep] = {
    "hopper_r_step_last": Sweep(_SHAPE, _HOPPER_R, hopper=True),
    "hopper_r_step": Sweep(_SHAPE, _HOPPER_R, hopper=True),
    "hopper_r_step_pooled": Sweep(_SHAPE, _HOPPER_R, options={"coarse": 2}, hopper=True),
    "hopper_r_step_values": Sweep(_SHAPE, _HOPPER_R, options={"last_l_update": False}, hopper=True),
    "hopper_flash": Sweep(_L_SHAPES[:2], (_HOPPER,), hopper=True),
    "r_step_last": Sweep(_SHAPE, (_TILES,)),
    "r_step": Sweep(_SHAPE, (_TILES,)),
    "flash_forward": Sweep(_L_SHAPES[:2], (_TILES,)),
    "r_backward_keys": Sweep(_SHAPE, _BACKWARD, training=True),
    "r_backward_z": Sweep(_SHAPE, _BACKWARD, training=True),
    "flash_backward_kv": Sweep(_SHAPE, _BACKWARD, training=True),
    "flash_backward_q": Sweep(_SHAPE, _BACKWARD, training=True),
    "l_output": Sweep(_L_SHAPES, (_L,)),
    "l_centroids": Sweep(_L_SHAPES, _L_COLUMNS),
    "l_backward_rows": Sweep(_L_SHAPES, _L_COLUMNS, training=True),
    "l_backward_columns": Sweep(_MANY_FRAMES, _L_COLUMNS, training=True),
    "l_rows": Sweep(_MANY_FRAMES, (_L,)),
    "flash_bias_forward": Sweep(_BIAS, (_TILES,), ranks=_RANKS),
    "flash_bias_rows": Sweep(_BIAS, _BACKWARD, training=True, ranks=_RANKS),
    "flash_bias_keys": Sweep(_BIAS, _BACKWARD, training=True, ranks=_RANKS),
}


class _Asked(dict[str, Options]):
    """Launch options that remember which kernels asked for them."""

    def __init__(self, options: Mapping[str, Options]) -> None:
        super().__init__(options)
        self.kernels: set[str] = set()

    def get(self, kernel: str, default: Any = None) -> Any:
        self.kernels.add(kernel)
        return super().get(kernel, default)


def _operator(
    sweep: Sweep, rank: int, shape: str, case: Case, device: torch.device, dtype: torch.dtype
) -> Callable[[], Sequence[torch.Tensor]]:
    """A call of the operator that launches the kernel of a sweep, in training with all gradients."""
    grid, heads = parse_shape(shape)
    heads = min(heads, case.heads)
    size, narrow = (1, grid.tokens, heads, case.head_dim), (1, grid.tokens, heads, rank)
    leaves = randn(grid.tokens, device, dtype, *[size] * 3, *[narrow] * (2 if rank else 0), learn=sweep.training)
    (grad,) = randn(1, device, dtype, size) if sweep.training else (None,)
    attend = partial(vmonarch_attention, grid=grid, **sweep.options) if not rank else flash_bias_attention
    return with_gradients(lambda: attend(*leaves, implementation="triton"), leaves, grad)


def ways(winners: Mapping[tuple[str, int], Options], case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """The operator with every candidate of a kernel, compared with the options in use.

    Args:
        winners: the best options so far by kernel and head dimension; all calls use them.
    """
    sweep = SWEEPS[case.kernel]
    base = {kernel: best for (kernel, head_dim), best in winners.items() if head_dim == case.head_dim}
    base["hopper"] = {"enabled": int(sweep.hopper)}
    calls = [_operator(sweep, rank, shape, case, device, dtype) for rank in sweep.ranks for shape in sweep.shapes]

    def run(candidate: Options) -> tuple[torch.Tensor, ...]:
        options = _Asked({**base, case.kernel: {**case.in_use, **candidate}})
        # The options are a context variable, which autograd's own threads would not see.
        with torch.autograd.set_multithreading_enabled(False), launch_overrides(options):
            results = tuple(x for call in calls for x in call())
        if case.kernel not in options.kernels:
            raise NotImplementedError("it is not launched at these shapes")
        return results

    found = lambda results: {str(i): x for i, x in enumerate(results)}
    expected = cache(lambda: {name: x.float() for name, x in found(run({})).items()})
    count = len(calls) * (4 + 2 * (sweep.ranks != (0,)) if sweep.training else 1)
    bounds = {str(i): BOUNDS[dtype] for i in range(count)}
    return {
        name: partial(Way, partial(run, candidate), found, expected, bounds)
        for name, candidate in sweep.candidates().items()
    }


def table_path(chip: str) -> Path:
    """The file of a chip's table: the existing one that names the chip, else a new one."""
    folder = Path(launch.__file__).parent / "tables"
    for path in sorted(folder.glob("*.json")):
        if json.loads(path.read_text()).get("chip") == chip:
            return path
    return folder / f"{re.sub(r'[^a-z0-9]+', '-', chip.lower()).strip('-')}.json"


def write_table(path: Path, chip: str, kernel: str, head_dim: int, options: Options, itemsize: int) -> None:
    """Write or extend a table atomically, one entry per line; these options replace those for the same sizes.

    Once a chip's table has an entry for a kernel and item size, the default table is no longer consulted for them. So
    the default entries of all head dimensions are copied first.
    """
    read = lambda file: json.loads(file.read_text())["entries"]
    entries = read(path) if path.exists() else []
    of_kernel = lambda entry: entry["kernel"] == kernel and entry["itemsize"] in (itemsize, None)
    if not any(map(of_kernel, entries)):
        defaults = read(Path(launch.__file__).parent / "tables" / "default.json")
        entries += [{**entry, "itemsize": itemsize} for entry in defaults if of_kernel(entry)]
    sizes = {"kernel": kernel, "itemsize": itemsize, "head_dim": block_dim(head_dim)}
    same = [i for i, entry in enumerate(entries) if sizes.items() <= entry.items()]
    # An entry for all item sizes stays for the other ones; if two fit, the first counts.
    at = same or [i for i, entry in enumerate(entries) if entry["kernel"] == kernel] or [len(entries)]
    entries[at[0] : at[0] + len(same[:1])] = [{**sizes, "options": options}]
    tuned = {"date": datetime.now(UTC).date().isoformat(), **package_versions(("torch", "triton"))}
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    text = f'{{\n "chip": {json.dumps(chip)},\n "tuned": {json.dumps(tuned)},\n "entries": [\n{lines}\n ]\n}}\n'
    with AtomicFiles(overwrite=True) as files:
        files.stage(path).write_text(text, encoding="utf-8")
    launch._tables.cache_clear()
    launch._tabled_options.cache_clear()


def run_tune(
    *,
    output: Path | None = None,
    kernels: Sequence[str] = tuple(SWEEPS),
    head_dims: Sequence[int] = (128, 64),
    budget: float = 480.0,
    device: str = "cuda",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Tune, and write the table after every kernel.

    Args:
        output: the table to write or extend; None for the chip's own in `kernels/common/tables`.
        budget: seconds after which no kernel is begun.

    Returns:
        as `run_bench`, with the table's path as "table", and with the tuned options in "tables".

    Raises:
        InputError: an argument cannot be used.
    """
    if device == "cpu" and output is None:
        raise InputError("output", "is needed with --device cpu: the interpreter has nothing to tune")
    on = check_device(device)
    check_names("kernels", kernels, SWEEPS)
    check_head_dims(head_dims)
    cases = [
        Case(
            label=f"{kernel} d={head_dim}",
            kernel=kernel,
            head_dim=head_dim,
            heads=12,
            training=SWEEPS[kernel].training,
            in_use=launch_options(kernel, on, measured_dtype(on), head_dim),
        )
        for kernel in kernels
        for head_dim in head_dims
        if launch.on_hopper(on) or not SWEEPS[kernel].hopper
    ]
    chip = device_name(on) if on.type == "cuda" else "interpreter"
    check_output(path := output or table_path(chip))
    names = dict.fromkeys(name for kernel in kernels for name in SWEEPS[kernel].candidates())
    winners: dict[tuple[str, int], Options] = {}
    rows: list[list[str]] = []

    def take(case: dict[str, Any]) -> None:
        """Write a case's best options; those in use stay unless another candidate gains enough."""
        ms = {row["method"]: row["ms"]["median"] for row in case["rows"] if "ms" in row}
        if IN_USE not in ms:
            return
        kernel, head_dim, used, best = case["kernel"], case["head_dim"], case["in_use"], min(ms, key=ms.__getitem__)
        best = best if ms[best] <= (1 - LEAST_GAIN) * ms[IN_USE] else IN_USE
        options = {**used, **SWEEPS[kernel].candidates()[best]}
        winners[kernel, head_dim] = options
        write_table(path, chip, kernel, head_dim, options, measured_dtype(on).itemsize)
        new = ", ".join(f"{key}={value}" for key, value in options.items() if used.get(key) != value) or "as before"
        times = [f"{ms[IN_USE]:.3f}", f"{ms[best]:.3f}", f"{ms[IN_USE] / ms[best]:.2f}x"]
        rows.append([kernel, str(head_dim), *times, new])
        say(f"{kernel} d={head_dim}: {times[0]} -> {times[1]} ms")

    bench = Bench(
        name="tune",
        methods=tuple(names),
        ours=tuple(names),
        cases=cases,
        ways=partial(ways, winners),
        base=IN_USE,
        compiled=lambda case, method: (case.label, method) if method in SWEEPS[case.kernel].candidates() else None,
        finish=take,
    )
    results = run_bench(bench, output=None, rounds=9, budget=budget, device=device, command="vmonarch tune", say=say)
    header = ["kernel", "d", "before ms", "after ms", "faster", "options"]
    return results | {"table": path, "tables": [{"name": "tuned", "header": header, "rows": rows}]}
