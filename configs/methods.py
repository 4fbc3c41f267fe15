"""Named attention methods: `configs/attention/*.yaml`, each a kind and the parameters of its processor.

    method = resolve_method("vmonarch-t3")                          # a name
    method = resolve_method("vmonarch:num_iterations=3,exact=null") # a name and overrides in one word
    method.install(pipe)                                            # any Wan pipeline; leaves exactly this method on it

To add a kind: one frozen dataclass with `install`, one line in `KINDS`, one YAML file per name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vmonarch.configs import (
    InputError,
    build,
    check_keys,
    deep_merge,
    parse_overrides,
    preset_names,
    read_yaml,
    suggest,
)


@dataclass(frozen=True)
class FullAttention:
    """Exact attention, through the pipeline's stock processors."""

    kind: ClassVar[str] = "full"

    def install(self, pipe: Any) -> None:
        """Put the stock processors back on `pipe`."""
        from vmonarch.installation import is_applied, restore

        if is_applied(pipe):
            restore(pipe)

    def without_dense(self) -> FullAttention:
        """Itself: it has no dense steps or layers to leave out."""
        return self


@dataclass(frozen=True)
class VMonarchAttention:
    """VMonarch attention; the parameters are those of `vmonarch.VMonarchProcessor`.

    Args:
        exact: null, "first_frame", or a mapping with rows, columns, band, aware (see `vmonarch.ExactBlocks`).
        dense_steps, dense_layers: a count, a fraction in (0, 1), or a list of indices that keep full attention.
    """

    kind: ClassVar[str] = "vmonarch"

    num_iterations: int = 2
    frames_per_block: int = 1
    tiles: tuple[int, int] = (1, 1)
    coarse: int = 1
    exact: Any = "first_frame"
    min_mass: float = 0.1
    dense_steps: Any = 0
    dense_layers: Any = 0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        from vmonarch.dense import DenseSet
        from vmonarch.kernels.monarch.api import check_vmonarch_options

        parameters = self._parameters()
        dense = {name: parameters.pop(name) for name in ("dense_steps", "dense_layers")}
        try:
            check_vmonarch_options(**parameters)
            for name, value in dense.items():
                DenseSet(name, value)
        except (TypeError, ValueError, NotImplementedError) as error:
            # The checks name the option first: "num_iterations must be at least 1, got 0".
            argument, _, problem = str(error).partition(" ")
            raise InputError(argument, problem) from error

    def _parameters(self) -> dict[str, Any]:
        """The processor's arguments."""
        from vmonarch.exact import ExactBlocks

        parameters = dataclasses.asdict(self)
        if isinstance(self.exact, Mapping):
            check_keys(ExactBlocks, self.exact, prefix="exact.")
            try:
                parameters["exact"] = ExactBlocks(**self.exact)
            except (TypeError, ValueError) as error:
                raise InputError("exact", f'must be null, "first_frame" or a mapping that fits: {error}') from error
        return parameters

    def install(self, pipe: Any) -> None:
        """Put this method on `pipe`, in place of whatever vmonarch method it carries."""
        from vmonarch import VMonarchProcessor, apply

        apply(pipe, VMonarchProcessor(**self._parameters()))

    def without_dense(self) -> VMonarchAttention:
        """The method with no dense steps: what a one-step warm-up has to run."""
        return dataclasses.replace(self, dense_steps=0)


Parameters = FullAttention | VMonarchAttention
KINDS: dict[str, type[FullAttention] | type[VMonarchAttention]] = {
    method.kind: method for method in (FullAttention, VMonarchAttention)
}


@dataclass(frozen=True)
class AttentionMethod:
    """A named method with its parameters.

    Args:
        name: as in `configs/attention/`.
        parameters: of the method's processor.
        label: what tables and videos call it: the name, and the overrides when there are any.
    """

    name: str
    parameters: Parameters
    label: str

    def install(self, pipe: Any) -> None:
        """Leave exactly this method on the Wan pipeline `pipe`."""
        self.parameters.install(pipe)

    def to_dict(self) -> dict[str, Any]:
        """Name, kind and every parameter, as plain values that `resolve_method` reads back."""
        return {"name": self.name, "kind": self.parameters.kind, "label": self.label, **vars(self.parameters)}


def method_names() -> list[str]:
    """Names of the methods that ship in `configs/attention/`."""
    return preset_names("attention")


def _split(text: str) -> list[str]:
    """Comma-separated overrides, with commas inside brackets left alone."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def resolve_method(spec: str | Mapping[str, Any], *, argument: str = "attention") -> AttentionMethod:
    """The method that `spec` names: `name`, `name:key=value,key=value`, or a mapping with `name` and parameters.

    Raises:
        InputError: an unknown name, an unknown parameter, or a value of another type.
    """
    label = ""
    if isinstance(spec, str):
        name, _, overrides = spec.partition(":")
        name = name.strip()
        values = parse_overrides(_split(overrides)) if overrides.strip() else {}
        label = spec.strip() if values else name
    elif isinstance(spec, Mapping):
        values = dict(spec)
        name = values.pop("name", None)
        label = str(values.pop("label", ""))
        kind = values.pop("kind", None)
        if kind is not None and kind not in KINDS:
            raise InputError(f"{argument}.kind", f"must be one of {', '.join(KINDS)}, got {kind!r}")
    else:
        raise InputError(argument, f"must be a method's name or a mapping with one, got {spec!r}")
    known = method_names()
    if name not in known:
        listed = ", ".join(known)
        raise InputError(argument, f"must be one of {listed}, got {name!r}{suggest(str(name), known)}")
    shipped = read_yaml(name, group="attention")
    schema = KINDS[shipped.pop("kind")]
    if not dataclasses.fields(schema) and values:
        raise InputError(f"{argument}.{next(iter(values))}", f"is no known key: {name} attention has no parameters")
    parameters = build(schema, deep_merge(shipped, values), prefix=f"{argument}.")
    if not label:
        changed = {key: value for key, value in values.items() if vars(build(schema, shipped))[key] != value}
        label = name + (":" if changed else "") + ",".join(f"{key}={value}" for key, value in changed.items())
    return AttentionMethod(name=name, parameters=parameters, label=label)
