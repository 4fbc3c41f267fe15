"""Named attention methods: `configs/attention/*.yaml`, each the name of a processor and its options.

    method = resolve_method("vmonarch-t3")                          # a name
    method = resolve_method("vmonarch:num_iterations=3,exact=null") # a name and overrides in one word
    method.install(pipe)                                            # leaves exactly this method on the pipeline

The processor itself checks its options. To add a processor: one line in `PROCESSORS`, one YAML file per name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from vmonarch.configs import (
    InputError,
    build,
    deep_merge,
    file_sha256,
    parse_overrides,
    preset_names,
    read_yaml,
    suggest,
)
from vmonarch.configs.gone import without_gone
from vmonarch.configs.stack import Stack
from vmonarch.validation import plain

if TYPE_CHECKING:
    from vmonarch.grid import LatentGrid
    from vmonarch.video_processor import VideoAttentionProcessor

# What `processor` says in YAML, and where the class is; "full" is the model's own attention.
PROCESSORS = {
    "full": "",
    "vmonarch": "vmonarch.processors:VMonarchProcessor",
    "two_resolution": "vmonarch.processors:TwoResolutionProcessor",
    "first_order": "vmonarch.processors:FirstOrderProcessor",
    "flashbias": "vmonarch.processors:FlashBiasProcessor",
    "based": "vmonarch.based:BasedProcessor",
    "control": "vmonarch.eval.controls:ControlProcessor",
}
# What the next release does not know any more: names that methods and recipes had until 2026-11-28.
OLD_METHODS = {"vmonarch-refresh": "near-lossless", "vmonarch-refresh-fast": "fast"}
OLD_RECIPES = {"near-lossless": "stack-near-lossless", "fast": "stack-fast"}
# What methods have besides the options of their processor; the hashes are of the files that these name.
_OWN = ("plan_sha256", "adapter", "adapter_sha256")
# Options of Based that no adapter decides on.
_FREE = ("dense_steps", "implementation")


@dataclass(frozen=True)
class AttentionMethod:
    """A named method: a processor with its options, or what a recipe switches on with it.

    Args:
        name: as in `configs/attention/` or `configs/recipes/`.
        processor_name: one of `PROCESSORS`.
        options: of the processor, all of them, as YAML has them; and what is the method's own: `adapter`, of Based, and
            the SHA-256 of the files that `plan` and `adapter` name.
        label: what tables and videos call it: the name, and the overrides when there are any.
        stack: what a recipe switches on besides; `vmonarch.pipelines.recipes` does it.
        attention: the method in a recipe.
    """

    name: str
    processor_name: str
    options: dict[str, Any]
    label: str
    stack: Stack = Stack()
    attention: AttentionMethod | None = None

    @property
    def countable(self) -> bool:
        """Whether its FLOPs can be counted without data and without what it has learnt."""
        return self.processor_name != "based" and self.options.get("beta") is None

    def without_dense(self) -> Self:
        """The method with no exact steps: what a one-step warm-up has to run."""
        off = {name: none for name, none in (("dense_steps", 0), ("refresh", None)) if name in self.options}
        return dataclasses.replace(self, options=self.options | off)

    def processor(self) -> VideoAttentionProcessor:
        """The method as a processor.

        Raises:
            InputError: it is none; the error says what takes its place.
        """
        if self.processor_name == "full":
            problem = "cannot be 'full', the model's own attention, which vmonarch.restore puts back"
            raise InputError("processor", problem)
        if adapter := self.options.get("adapter"):
            raise InputError("processor", f"cannot be 'based' with {adapter!r}: vmonarch.load_adapter applies adapters")
        return _made(self.processor_name, self.options)

    def install(self, pipe: Any) -> None:
        """Put this method on `pipe`, in place of whatever vmonarch method it carries.

        Raises:
            InputError: an option does not fit the pipeline or the adapter, or the adapter does not fit the pipeline.
        """
        from vmonarch import apply, restore

        # What a method before had learnt is in its file.
        restore(pipe)
        if self.options.get("adapter") is not None:
            self._load_adapter(pipe)
        elif self.processor_name != "full":
            with _naming_the_option():
                apply(pipe, self.processor())

    def _load_adapter(self, pipe: Any) -> None:
        from vmonarch import load_adapter

        adapter, wanted = self.options["adapter"], _made(self.processor_name, self.options).config
        try:
            installed = load_adapter(pipe, _adapter_file(adapter)[0], **{name: wanted[name] for name in _FREE})
            learnt = installed.processor.config
            for name, value in self.options.items():
                if name not in (*_OWN, *_FREE) and value is not None and wanted[name] != learnt[name]:
                    installed.restore()
                    raise InputError(name, f"is {learnt[name]} in the adapter {adapter!r}, got {wanted[name]}")
        except InputError:
            raise
        except (TypeError, ValueError, ImportError) as error:
            raise _unusable_adapter(adapter, error) from error

    def check_run(self, argument: str, grid: LatentGrid, steps: int, layers: int, why_not_triton: str | None) -> None:
        """Check the options that depend on the video, the model and the device, before any of them is there.

        Args:
            argument: of the user, for the error.
            grid: of the video's latent tokens.
            layers: of a transformer.
            why_not_triton: why kernels cannot run there; None if they can.

        Raises:
            InputError: an option does not fit.
        """
        from vmonarch.dense import DenseSet
        from vmonarch.residuals import Refresh

        try:
            for name, total in (("dense_steps", steps), ("dense_layers", layers)):
                DenseSet(name, self.options.get(name) or 0).contains(0, total)
            refresh = Refresh.parse(self.options.get("refresh"))
            if refresh is not None:
                refresh.schedule(steps)
            if self.processor_name != "full":
                _made(self.processor_name, self.options).check_grid(grid)
            if why_not_triton and self.options.get("implementation") == "triton":
                raise ValueError(f"implementation=triton is not possible: {why_not_triton}; auto and torch are")
        except ValueError as error:
            raise InputError(argument, f"{self.label!r} cannot compute this video: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Name, processor and every option, or a recipe's attention and stack: what `resolve_method` reads back."""
        about: dict[str, Any] = {"name": self.name, "label": self.label}
        if self.attention is None:
            return about | {"processor": self.processor_name} | self.options
        stack = {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(self.stack).items()}
        return about | {"attention": self.attention.to_dict()} | stack


def method_names() -> list[str]:
    """Names of the methods that ship in `configs/attention/`."""
    return preset_names("attention")


def recipe_names() -> list[str]:
    """Names of the recipes that ship in `configs/recipes/`."""
    return preset_names("recipes")


def with_options(word: str, options: str) -> str:
    """A word of `resolve_method` with further options in its own form, "a=1,b=2"; none if "" is given."""
    return word + (options and f"{',' if ':' in word else ':'}{options}")


def merge_attention(below: Any, above: Any, *, recipes: bool = True) -> Any:
    """One attention entry over another.

    Args:
        recipes: whether `below` may be a recipe.
    """
    if isinstance(above, str) or not isinstance(above, Mapping):
        return above
    if "name" in above:
        return dict(above)
    if isinstance(below, str):
        below = resolve_method(below, recipes=recipes).to_dict()
    if not isinstance(below, Mapping):
        return dict(above)
    # The label named the options as they were.
    merged = _over({key: value for key, value in below.items() if key != "label"}, above)
    if "attention" in above:
        merged["attention"] = merge_attention(below.get("attention"), above["attention"], recipes=False)
    return merged


def resolve_method(
    spec: str | Mapping[str, Any], *, argument: str = "attention", recipes: bool = False
) -> AttentionMethod:
    """The method that `spec` names: `name`, `name:key=value,key=value`, or a mapping with `name` and options.

    Args:
        recipes: whether it may be a recipe; for callers that do what its stack says.

    Raises:
        InputError: an unknown name, an unknown option, or a value that the processor refuses.
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
    else:
        raise InputError(argument, f"must be a method's name or a mapping with one, got {spec!r}")
    values = without_gone(values, f"{argument}.")
    before, name = name, _name_now(name, values, argument)
    if name != before and (label == before or label.startswith(f"{before}:")):
        label = f"{name}{label.removeprefix(before)}"
    if name in recipe_names():
        if not recipes:
            raise InputError(argument, f"must be an attention method, got the recipe {name!r}")
        return _recipe(name, values, label, argument)
    known = [*method_names(), *(recipe_names() if recipes else ())]
    if name not in known:
        listed = ", ".join(known)
        raise InputError(argument, f"must be one of {listed}, got {name!r}{suggest(str(name), known)}")
    shipped = read_yaml(name, group="attention")
    processor = shipped.pop("processor")
    given = _options_now(values, processor, argument)
    try:
        options = _complete(processor, {key: _listed(value) for key, value in deep_merge(shipped, given).items()})
    except InputError as error:
        raise InputError(f"{argument}.{error.argument}", error.problem) from error
    if not label:
        label = _label(name, given, resolve_method(name).options if given else {})
    return AttentionMethod(name, processor, options, label)


def _complete(processor: str, given: dict[str, Any]) -> dict[str, Any]:
    """The options of a method, those that are not given at the processor's defaults.

    Raises:
        InputError: an unknown option, one that the processor refuses, or a file that is missing or not what it was.
    """
    known = [] if processor == "full" else [name for name in _class(processor)._OPTIONS if name != "grid"]
    known += ("adapter", "adapter_sha256") * (processor == "based") + ("plan_sha256",) * ("plan" in known)
    for name in given:
        # A control checks its own, which depend on which it is.
        if name not in known and processor != "control":
            raise InputError(name, f"is no known key{suggest(name, known)}; known: {', '.join(known) or 'none'}")
    if processor == "full":
        return given
    defaults = _made(processor, given).config
    defaults |= defaults.pop("options", {})
    if given.get("adapter") is not None:
        # It decides on what is null.
        defaults = {name: defaults[name] if name in _FREE else None for name in defaults}
    options = {name: value for name, value in defaults.items() if name != "grid"} | given
    for option, find in (("plan", _plan_file), ("adapter", _adapter_file)):
        if isinstance(word := options.get(option), str):
            _pin(options, option, *find(word))
    return options


def _pin(options: dict[str, Any], option: str, file: Path, shipped: bool) -> None:
    """Fill in the SHA-256 of the file that an option names, and where it is if it is no name that finds it anywhere."""
    found, entry = file_sha256(file), f"{option}_sha256"
    if options.get(entry) not in (None, found):
        raise InputError(option, f"{options[option]!r} is not the file that it was: its SHA-256 is {found}")
    options[entry] = found
    if not shipped:
        # A record must find it from any folder.
        options[option] = str(file.resolve())


def _plan_file(word: str) -> tuple[Path, bool]:
    """Where a plan is, and whether it ships, so that its name finds it on any machine."""
    from vmonarch.plan import plan_file, plan_names

    return plan_file(word), word in plan_names()


def _adapter_file(word: str) -> tuple[Path, bool]:
    """As `_plan_file`, of an adapter."""
    from vmonarch.pipelines.embedded import embedded_adapter_path

    try:
        file = embedded_adapter_path() if word == "embedded" else Path(word).expanduser()
    except FileNotFoundError as error:
        raise _unusable_adapter(word, error) from error
    if not file.is_file():
        raise _unusable_adapter(word, "there is no such file")
    return file, word == "embedded"


def _unusable_adapter(adapter: str, reason: object) -> InputError:
    return InputError(
        "adapter",
        f"{adapter!r} cannot be used: {reason}. Based has to be trained for a model: give adapter=FILE of"
        " vmonarch.save_adapter, or adapter=null for parameters that have learnt nothing",
    )


def _class(processor: str) -> Any:
    module, _, name = PROCESSORS[processor].partition(":")
    return getattr(importlib.import_module(module), name)


def _made(processor: str, options: Mapping[str, Any]) -> VideoAttentionProcessor:
    """The processor with these options, without what an adapter has learnt."""
    own = {name: value for name, value in options.items() if name not in _OWN}
    if processor == "based":
        own = {name: value for name, value in own.items() if value is not None}
    named = [own.pop("control")] if processor == "control" else []
    with _naming_the_option():
        made: VideoAttentionProcessor = _class(processor)(*named, **own)
        return made


@contextlib.contextmanager
def _naming_the_option() -> Iterator[None]:
    """Turn errors of checks, which name the option first ("coarse must be at least 1, got 0"), into `InputError`s."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        option, _, problem = str(error).partition(" ")
        raise InputError(option.rstrip(":"), problem) from error


def _listed(value: Any) -> Any:
    """An option as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _listed(entry) for key, entry in value.items()}
    value = plain(value)
    return [_listed(entry) for entry in value] if isinstance(value, tuple) else value


def _options_now(values: Mapping[str, Any], processor: str, argument: str) -> dict[str, Any]:
    """Options by the names that they have now, of entries that may be older.

    Raises:
        InputError: they are of another processor, or ask for what is gone.
    """
    given = dict(values)
    # Records had `kind` until 2026-11-28, which told controls apart.
    given.pop("kind", None)
    if given.pop("processor", processor) != processor:
        raise InputError(f"{argument}.processor", f"must be {processor!r} here, got {values['processor']!r}")
    if (reach := given.pop("reach", None)) is not None:
        given["bias"] = {"reach": reach}
    if "sparsity" in given:
        given["share"] = round(1 - given.pop("sparsity"), 12)
    if "cube" in given:
        given["tile"] = given["query_tile"] = given.pop("cube")
    return given


def _name_now(name: Any, values: Mapping[str, Any], argument: str) -> Any:
    """What a method or recipe is called now, by a name that may be an old one; warns unless `to_dict` wrote `values`.

    Raises:
        InputError: the name was a recipe's and is a method's now, and has what only recipes have.
    """
    if not isinstance(name, str):
        return name
    recorded = lambda entry: isinstance(entry, Mapping) and not {"kind", "processor"}.isdisjoint(entry)
    if name in OLD_RECIPES and recorded(values.get("attention")):
        return OLD_RECIPES[name]
    if name in OLD_RECIPES:
        for key in values:
            if key == "attention" or key in {field.name for field in dataclasses.fields(Stack)}:
                problem = f"is for recipes, and {name!r} is a method: the recipe is called {OLD_RECIPES[name]!r} now"
                raise InputError(f"{argument}.{key}", problem)
        note = f"{name!r} is an attention method; the recipe that had this name is {OLD_RECIPES[name]!r}"
    else:
        note = f"{name!r} is called {OLD_METHODS.get(name)!r} now; the next release does not know the old name"
    if not recorded(values) and (name in OLD_METHODS or (argument == "recipe" and name in OLD_RECIPES)):
        warnings.warn(note, FutureWarning, stacklevel=3)
    return OLD_METHODS.get(name, name)


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Options over others; another kind of cache leaves nothing of the arguments of the one before."""
    merged = deep_merge(below, above)
    if isinstance(cache := above.get("cache"), Mapping) and "kind" in cache:
        merged["cache"] = dict(cache)
    return merged


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


def _label(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The name, and the values that are not the defaults."""
    changed = {key: value for key, value in values.items() if key not in _OWN[::2] and defaults.get(key) != value}
    return name + (":" if changed else "") + ",".join(f"{key}={value}" for key, value in changed.items())


def _recipe(name: str, values: Mapping[str, Any], label: str, argument: str) -> AttentionMethod:
    """The recipe of this name in `configs/recipes/`, with `values` over what it says."""
    shipped = read_yaml(name, group="recipes")
    given = _over(shipped, {key: value for key, value in values.items() if key != "attention"})
    attention = given.pop("attention")
    if "attention" in values:
        attention = merge_attention(attention, values["attention"], recipes=False)
    method = resolve_method(attention, argument=f"{argument}.attention")
    stack = build(Stack, given, prefix=f"{argument}.")
    if not label:
        defaults = {field.name: field.default for field in dataclasses.fields(Stack)} | shipped
        label = _label(name, given | {"attention": method.label}, defaults)
    return dataclasses.replace(method, name=name, label=label, stack=stack, attention=method)
