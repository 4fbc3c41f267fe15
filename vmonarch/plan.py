"""A plan: the attention that every head of every layer computes, made by `vmonarch calibrate` or by hand.

As JSON:

    {"format": "vmonarch-plan-1",
     "methods": {"t1": {"num_iterations": 1}, "own": {"exact": {"band": 0}}, "full": null},
     "layers": {"transformer": [["t1", "full", …], …]},
     "about": {…}}

A method holds the options of `vmonarch_attention` that differ from the defaults, or, with "kind": "two_resolution" or
"first_order", those of `two_resolution_attention` or `first_order_attention`; null is exact attention. `layers` names a
method for each head of each layer, for each transformer of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vmonarch.configs import FOLDER, as_json, build, read_document
from vmonarch.files import write_json
from vmonarch.flops import first_order_flops, full_flops, two_resolution_flops, vmonarch_flops
from vmonarch.grid import LatentGrid
from vmonarch.kernels.first_order.api import first_order_attention
from vmonarch.kernels.monarch.api import vmonarch_attention
from vmonarch.kernels.two_resolution.api import two_resolution_attention
from vmonarch.options import FirstOrderOptions, Options, TwoResolutionOptions, VMonarchOptions

FORMAT = "vmonarch-plan-1"
_SHIPPED = FOLDER / "plans"
# The name of exact attention in plans of `vmonarch calibrate`.
FULL = "full"
# What a head may compute beside exact attention, by its options: the op, and the forward operations of one head.
_OPS: dict[type[Options], tuple[Callable[..., Any], Callable[..., float]]] = {
    VMonarchOptions: (vmonarch_attention, vmonarch_flops),
    TwoResolutionOptions: (two_resolution_attention, two_resolution_flops),
    FirstOrderOptions: (first_order_attention, first_order_flops),
}


def parse_method(name: str, options: Any) -> Options | None:
    """The options of a plan's method; None for exact attention.

    Raises:
        TypeError, ValueError: an unknown option, or an unsupported value; the message begins with "plan".
    """
    if isinstance(options, Mapping):
        named = dict(options)
        op = named.pop("kind", VMonarchOptions.op)
        options_of: Any = {known.op: known for known in _OPS}.get(op)
        if options_of is None:
            known = ", ".join(each.op for each in _OPS)
            raise ValueError(f"plan: method {name!r} has the kind {op!r}; supported: {known}")
        try:
            options = build(options_of, named)
        except (TypeError, ValueError) as error:
            raise ValueError(f"plan: method {name!r}: {error}") from error
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"plan: method {name!r} must be null or a mapping of options, got {options!r}")
    return options


def method_dict(options: Options | None) -> dict[str, Any] | None:
    """A method as plain values for JSON; the inverse of `parse_method`."""
    if options is None:
        return None
    op = {} if isinstance(options, VMonarchOptions) else {"kind": options.op}
    return op | {name: as_json(value) for name, value in options.changed().items()}


def method_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options, **arguments: Any
) -> Any:
    """Call the op of these options with the other arguments, one of which is `grid`."""
    return _OPS[type(options)][0](query, key, value, options=options, **arguments)


def plan_names() -> list[str]:
    """Names of the plans in `configs/plans/`, which are for the embedded model."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


def plan_file(plan: str | Path) -> Path:
    """The file of a plan, given by the name of a shipped one or by its path."""
    return _SHIPPED / f"{plan}.json" if str(plan) in plan_names() else Path(plan).expanduser()


def method_flops(options: Options | None, grid: LatentGrid, head_dim: int) -> float:
    """Forward operations of one head with a method (`vmonarch.flops`)."""
    return full_flops(grid, head_dim) if options is None else _OPS[type(options)][1](grid, head_dim, options)


@dataclass(frozen=True)
class AttentionPlan:
    """What every head of every layer computes; `vmonarch calibrate` makes such plans.

    Args:
        methods: options by name, or mappings of them; None for exact attention.
        layers: names, one for each head of each layer, by name of the transformer.
        about: how the plan was made.

    Raises:
        TypeError, ValueError: a method is not as described, a head names an unknown method, or layers have different
            numbers of heads.
    """

    methods: Mapping[str, Options | None]
    layers: Mapping[str, Sequence[Sequence[str]]]
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not isinstance(self.layers, Mapping) or not self.layers:
            raise TypeError("plan: methods and layers must be mappings, and layers must not be empty")
        methods = {name: parse_method(name, options) for name, options in self.methods.items()}
        layers = {}
        for component, heads_of in self.layers.items():
            rows = tuple(tuple(heads) for heads in heads_of)
            if not rows or not rows[0] or len({len(heads) for heads in rows}) > 1:
                raise ValueError(f"plan: layers of {component!r} must all name as many heads, at least one")
            for layer, heads in enumerate(rows):
                if unknown := set(heads) - methods.keys():
                    problem = f"names methods that it has not: {unknown}; it has {', '.join(methods)}"
                    raise ValueError(f"plan: layer {layer} of {component!r} {problem}")
            layers[component] = rows
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "layers", layers)

    @classmethod
    def parse(cls, plan: object) -> AttentionPlan:
        """A plan from a plan, from the contents of its JSON, from the path of that file, or from a shipped one's name.

        Raises:
            TypeError, ValueError: it is none of these, the file cannot be read or does not hold a plan.
        """
        if isinstance(plan, AttentionPlan):
            return plan
        if isinstance(plan, (str, Path)):
            if not plan_file(plan).is_file():
                known = ", ".join(plan_names())
                raise ValueError(f"plan {str(plan)!r} cannot be read: no file, and none that ships ({known})")
            plan = read_document("plan", plan_file(plan), FORMAT, "plan")
        if not isinstance(plan, Mapping):
            raise TypeError(f"plan must be an AttentionPlan, the path of its JSON or what that holds, got {plan!r}")
        if plan.get("format") != FORMAT or not {"methods", "layers"} <= plan.keys():
            got = f"got {plan.get('format')!r} and {[*plan]}"
            raise ValueError(f"plan: format must be {FORMAT!r}, with methods and layers; {got}")
        return cls(plan["methods"], plan["layers"], plan.get("about", {}))

    def to_dict(self) -> dict[str, Any]:
        """What the JSON holds."""
        return {
            "format": FORMAT,
            "methods": {name: method_dict(options) for name, options in self.methods.items()},
            "layers": {component: [list(heads) for heads in rows] for component, rows in self.layers.items()},
            "about": dict(self.about),
        }

    def save(self, path: str | Path) -> None:
        """Write the JSON, whole or not at all; an existing file is replaced."""
        write_json(Path(path).expanduser(), self.to_dict())

    def heads_of(self, component: str, layer: int, layers: int, heads: int) -> tuple[str, ...]:
        """Methods of the heads of one layer; the model has `layers` layers of `heads` heads.

        Raises:
            ValueError: the plan is not for such a model.
        """
        rows = self.layers.get(component)
        if rows is None:
            raise ValueError(f"plan: it is for {', '.join(self.layers)}, but the pipeline has {component} too")
        if (len(rows), len(rows[0])) != (layers, heads):
            raise ValueError(
                f"plan: it is for {len(rows)} layers of {len(rows[0])} heads, but {component} has {layers} of {heads}"
            )
        return tuple(rows[layer])
