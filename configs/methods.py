"""Named attention methods: `configs/attention.yaml`, each the name of a processor and its options.

    method = resolve_method("vmonarch-t3")                          # a name
    method = resolve_method("vmonarch:num_iterations=3,exact=null") # a name and overrides in one word
    method.install(pipe)                                            # leaves exactly this method on the pipeline

The processor itself checks its options. To add a processor: one line in `PROCESSORS`, one entry in YAML per name.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmonarch.configs import (
    InputError,
    Settings,
    as_json,
    build,
    check_choice,
    choice,
    deep_merge,
    file_sha256,
    naming_the_option,
    parse_override,
    preset_names,
    presets,
)

if TYPE_CHECKING:
    from vmonarch.base import VideoAttentionProcessor
    from vmonarch.grid import LatentGrid

# Classes by the value of `processor` in YAML; "full" is the model's own attention.
PROCESSORS = {
    "full": "",
    "vmonarch": "vmonarch.processors:VMonarchProcessor",
    "two_resolution": "vmonarch.processors:TwoResolutionProcessor",
    "first_order": "vmonarch.processors:FirstOrderProcessor",
    "flashbias": "vmonarch.processors:FlashBiasProcessor",
    "based": "vmonarch.based:BasedProcessor",
    "control": "vmonarch.eval.controls:ControlProcessor",
}
# Entries of methods besides the options of their processor: hashes of the files that options name.
_HASHES = ("adapter_sha256", "plan_sha256")
_ADVICE = (
    "What learns has to be trained for a model: give adapter=FILE of vmonarch.save_adapter, or adapter=null for"
    " parameters that have learnt nothing"
)


@dataclass(frozen=True)
class Additions(Settings):
    """What a recipe adds to attention; `vmonarch.pipelines.recipes` switches it on.

    Args:
        compile: compile the transformer's blocks, and on a GPU let cuDNN compute exact attention.
        backend: "fa3" lets FlashAttention-3 compute it, if it is installed, on Hopper.
        linears: "float8" computes the blocks' linear layers in float8, which needs Ada, Hopper or newer;
            "float8-feed-forward" those of feed-forwards alone; "float8-weights" only keeps the weights of all so. These
            need torchao. None: the model's own type.

    Raises:
        InputError: an unknown backend or kind of linear layers.
    """

    compile: bool = False
    backend: str | None = choice(None, "fa3")
    linears: str | None = choice(None, "float8", "float8-feed-forward", "float8-weights")


@dataclass(frozen=True)
class AttentionMethod:
    """A named method: a processor with its options, and what a recipe switches on besides.

    Args:
        name: as in `configs/attention.yaml` or `configs/recipes.yaml`.
        processor_name: one of `PROCESSORS`.
        options: all options of the processor, as YAML values; `adapter`, the file with its parameters; and the SHA-256
            of the files that `plan` and `adapter` name.
        label: its name in tables and videos: the name, with the overrides if there are any.
        additions: those of a recipe; `vmonarch.pipelines.recipes` switches them on.
        attention: the method in a recipe; None if this is no recipe.
    """

    name: str
    processor_name: str
    options: dict[str, Any]
    label: str
    additions: Additions = Additions()
    attention: AttentionMethod | None = None

    def without_dense(self) -> AttentionMethod:
        """The method without exact steps, for a warm-up of one step."""
        off = {name: none for name, none in (("dense_steps", 0), ("refresh", None)) if name in self.options}
        return dataclasses.replace(self, options=self.options | off)

    def processor(self) -> VideoAttentionProcessor:
        """The method as a processor.

        Raises:
            InputError: the method is no processor; the error says what to use instead.
        """
        if self.processor_name == "full":
            raise InputError("processor", "cannot be 'full', the model's own attention: vmonarch.restore puts it back")
        if adapter := self.options.get("adapter"):
            raise InputError("processor", f"cannot be made with {adapter!r}: vmonarch.load_adapter applies adapters")
        return _made(self.processor_name, self.options)

    def install(self, pipe: Any) -> None:
        """Put this method on `pipe`, in place of whatever vmonarch method it carries.

        Raises:
            InputError: an option or the adapter does not fit the pipeline, or an option the adapter.
        """
        from vmonarch import apply, load_adapter, restore

        # Parameters of an earlier method are safe in its file.
        restore(pipe)
        if (adapter := self.options.get("adapter")) is not None:
            try:
                load_adapter(pipe, _adapter_file(adapter), **_own_options(self.processor_name, self.options))
            except (TypeError, ValueError, ImportError) as error:
                raise InputError("adapter", f"{adapter!r} cannot be used: {error}. {_ADVICE}") from error
        elif self.processor_name != "full":
            with naming_the_option():
                apply(pipe, self.processor())

    def check_run(self, argument: str, grid: LatentGrid, steps: int, layers: int, why_not_triton: str | None) -> None:
        """Check the options that depend on the video, the model and the device, before any of them is there.

        Args:
            argument: the user's argument, for the error.
            grid: that of the video's latent tokens.
            layers: number of layers of a transformer.
            why_not_triton: why kernels cannot run on the device; None if they can.

        Raises:
            InputError: an option does not fit.
        """
        if self.processor_name == "full":
            return
        try:
            _made(self.processor_name, self.options).check_run(grid, steps, layers)
            if why_not_triton and self.options.get("implementation") == "triton":
                raise ValueError(f"implementation=triton is not possible: {why_not_triton}; auto and torch are")
        except ValueError as error:
            raise InputError(argument, f"{self.label!r} cannot compute this video: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Name, processor and every option, or a recipe's attention and additions, as `resolve_method` takes them."""
        about: dict[str, Any] = {"name": self.name, "label": self.label}
        if self.attention is None:
            return about | {"processor": self.processor_name} | self.options
        return about | {"attention": self.attention.to_dict()} | self.additions.to_dict()


def merge_attention(below: Any, above: Any) -> Any:
    """One attention entry over another, which it replaces unless it is a mapping without a name."""
    if not isinstance(above, Mapping) or "name" in above or not isinstance(below, str | Mapping):
        return above
    # The label describes the old options, and a hash the file that is being replaced.
    stale = {"label", *(f"{key}_sha256" for key in above)}
    below = {key: value for key, value in _entry(below).items() if key not in stale}
    merged = deep_merge(below, above)
    if "attention" in above:
        merged["attention"] = merge_attention(below.get("attention"), above["attention"])
    return merged


def _entry(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Name, label and options of an attention entry."""
    if not isinstance(spec, str):
        return dict(spec)
    name, _, words = (part.strip() for part in spec.partition(":"))
    # No key follows the commas inside values.
    values: dict[str, Any] = {}
    for word in re.split(r",\s*(?=[a-z_][\w.]*=)", words) if words else ():
        values = deep_merge(values, parse_override(word))
    return {"name": name, "label": spec.strip() if values else name} | values


def resolve_method(
    spec: str | Mapping[str, Any] | AttentionMethod, *, argument: str = "attention", recipes: bool = False
) -> AttentionMethod:
    """The method of `spec`: `name`, `name:key=value,key=value`, a mapping with `name` and options, or a method itself.

    Args:
        recipes: whether it may be a recipe; for callers that switch on what it adds.

    Raises:
        InputError: an unknown name, an unknown option, or a value that the processor refuses.
    """
    if isinstance(spec, AttentionMethod):
        return spec
    if not isinstance(spec, str | Mapping):
        raise InputError(argument, f"must be a method's name or a mapping with one, got {spec!r}")
    values = _entry(spec)
    name, label = str(values.pop("name", None)), values.pop("label", "")
    check_choice(argument, name, preset_names("attention") + preset_names("recipes") * recipes)
    with naming_the_option(f"{argument}."):
        if name in preset_names("recipes"):
            return _recipe(name, values, label)
        shipped = dict(presets("attention")[name])
        processor = shipped.pop("processor")
        if (named := values.pop("processor", processor)) != processor:
            raise InputError("processor", f"must be {processor!r} here, got {named!r}")
        options = _complete(processor, as_json(deep_merge(shipped, values)))
        defaults = {} if label or not values else _made(processor, shipped).config | shipped
    return AttentionMethod(name, processor, options, label or _label(name, values, defaults))


def _recipe(name: str, values: Mapping[str, Any], label: str) -> AttentionMethod:
    """The recipe of this name, with `values` over what it says."""
    shipped = presets("recipes")[name]
    attention = shipped["attention"]
    if "attention" in values:
        attention = merge_attention(attention, values["attention"])
    method = resolve_method(attention)
    given = deep_merge(shipped, values) | {"attention": method.label}
    additions = build(Additions, {key: value for key, value in given.items() if key != "attention"})
    label = label or _label(name, given, vars(Additions()) | shipped)
    return dataclasses.replace(method, name=name, label=label, additions=additions, attention=method)


def _label(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The name, and the values that are not the defaults."""
    changed = {key: value for key, value in values.items() if key not in _HASHES and defaults.get(key) != value}
    return name + (":" if changed else "") + ",".join(f"{key}={value}" for key, value in changed.items())


def _complete(processor: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of a method, with the processor's defaults where none are given.

    Raises:
        TypeError, ValueError: an option is unknown or refused, or names a file that is missing or not what it was.
    """
    from vmonarch.plan import plan_file

    if processor == "full":
        if given:
            raise InputError(next(iter(given)), "is no option of full attention, which has none")
        return {}
    made = {name: value for name, value in _made(processor, given).config.items() if name != "grid"}
    # An adapter decides everything that is not given.
    options = given if given.get("adapter") is not None else made | given
    for option, find in (("plan", plan_file), ("adapter", _adapter_file)):
        if isinstance(word := options.get(option), str):
            try:
                file = find(word)
                found, entry = file_sha256(file), f"{option}_sha256"
            except OSError as error:
                advice = f". {_ADVICE}" if option == "adapter" else ""
                raise InputError(option, f"{word!r} cannot be used: {error}{advice}") from error
            if options.get(entry) not in (None, found):
                raise InputError(option, f"{word!r} is not the file that it was: its SHA-256 is {found}")
            # A record must find the file from any folder; shipped files have the same name everywhere.
            named = not Path(word).expanduser().is_file()
            options = options | {entry: found, option: word if named else str(file.resolve())}
    return options


def _own_options(processor: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the processor. For Based, null leaves the decision to it or to an adapter."""
    left_out = (*_HASHES, "adapter") if processor in ("based", "control") else _HASHES
    given = {name: value for name, value in options.items() if name not in left_out}
    return {name: value for name, value in given.items() if value is not None or processor != "based"}


def _made(processor: str, options: Mapping[str, Any]) -> VideoAttentionProcessor:
    """The processor with these options, without an adapter's parameters."""
    return build(pkgutil.resolve_name(PROCESSORS[processor]), _own_options(processor, options))


def _adapter_file(word: str) -> Path:
    from vmonarch.pipelines.embedded import embedded_adapter_path

    return embedded_adapter_path() if word == "embedded" else Path(word).expanduser()
