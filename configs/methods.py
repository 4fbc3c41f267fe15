"""Named attention methods: `configs/attention/*.yaml`, each a kind and the parameters of its processor.

    method = resolve_method("vmonarch-t3")                          # a name
    method = resolve_method("vmonarch:num_iterations=3,exact=null") # a name and overrides in one word
    method.install(pipe)                                            # any Wan pipeline; leaves exactly this method on it

To add a kind: one frozen dataclass with `install`, one line in `KINDS`, one YAML file per name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vmonarch.configs import (
    InputError,
    build,
    check_keys,
    deep_merge,
    file_sha256,
    parse_overrides,
    preset_names,
    read_yaml,
    suggest,
)
from vmonarch.configs.stack import Stack
from vmonarch.exact import ExactBlocks
from vmonarch.grid import LatentGrid
from vmonarch.options import OPTION_FIELDS, FirstOrderOptions, Options, VMonarchOptions
from vmonarch.two_resolution_options import TWO_RESOLUTION_FIELDS, TwoResolutionOptions
from vmonarch.validation import check_implementation, check_parallel_by

if TYPE_CHECKING:
    from vmonarch.based import BasedProcessor
    from vmonarch.processors import FirstOrderProcessor, FlashBiasProcessor, TwoResolutionProcessor, VMonarchProcessor
    from vmonarch.video_processor import VideoAttentionProcessor


# What the next release does not know any more: names that methods and recipes had until 2026-11-28.
OLD_METHODS = {"vmonarch-refresh": "near-lossless", "vmonarch-refresh-fast": "fast"}
OLD_RECIPES = {"near-lossless": "stack-near-lossless", "fast": "stack-fast"}


@dataclass(frozen=True)
class _Kind:
    """What all kinds of attention have."""

    kind: ClassVar[str]

    def processor(self) -> VideoAttentionProcessor:
        """The method as a processor.

        Raises:
            InputError: it is none; the error says what takes its place.
        """
        raise NotImplementedError

    def install(self, pipe: Any) -> None:
        """Put this method on `pipe`, in place of whatever vmonarch method it carries."""
        processor = self.processor()
        with _naming_the_option():
            _replace(pipe, processor)

    @property
    def countable(self) -> bool:
        """Whether its FLOPs can be counted without data and without what it has learnt."""
        return True

    def without_dense(self) -> Self:
        """The method with no exact steps: what a one-step warm-up has to run."""
        names = {field.name for field in dataclasses.fields(self)}
        off = {name: value for name, value in (("dense_steps", 0), ("refresh", None)) if name in names}
        return dataclasses.replace(self, **off)

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if an option does not fit videos of this latent grid."""

    def _fill_in_file(self, option: str, file: Path | None, shipped: bool) -> None:
        """Fill in the SHA-256 of the file that `option` names, which must be one that is given, and where it is.

        Args:
            shipped: whether the option is a name, which finds the file on any machine.
        """
        found = None if file is None else file_sha256(file)
        if getattr(self, f"{option}_sha256") not in (None, found):
            was = getattr(self, option)
            raise InputError(option, f"{was!r} is not the file that it was: its SHA-256 is {found}")
        object.__setattr__(self, f"{option}_sha256", found)
        if file is not None and not shipped:
            # A record must find it from any folder.
            object.__setattr__(self, option, str(file.resolve()))


@dataclass(frozen=True)
class FullAttention(_Kind):
    """Exact attention, through the pipeline's stock processors."""

    kind: ClassVar[str] = "full"

    def processor(self) -> VideoAttentionProcessor:
        """There is none."""
        raise InputError("processor", "cannot be 'full', the model's own attention, which vmonarch.restore puts back")

    def install(self, pipe: Any) -> None:
        """Put the stock processors back on `pipe`."""
        from vmonarch import restore

        restore(pipe)


@dataclass(frozen=True, kw_only=True)
class VMonarchAttention(VMonarchOptions, _Kind):
    """VMonarch attention; the parameters are `VMonarchOptions` and those of `vmonarch.VMonarchProcessor`.

    Args:
        reach: null, or the reach along (time, height, width) of a `vmonarch.bias.SpatioTemporalDecay` over all heads.
        plan: null, or a plan of `vmonarch calibrate`, which decides all of the above for every head: its path, or the
            name of one in `configs/plans/`.
        plan_sha256: of that file, filled in; given, it is what the file must have.
        dense_steps, dense_layers: a count, a fraction in (0, 1), or a list of indices that keep full attention.
        refresh: null, or the steps with exact attention that renew the residual, given like `dense_steps`; or a mapping
            with steps, dtype and offload (see `vmonarch.Refresh`).
        parallel_by: what processes share under context parallelism, "heads" or "frames".
    """

    reach: tuple[float, float, float] | None = None
    plan: str | None = None
    plan_sha256: str | None = None
    dense_steps: Any = 0
    dense_layers: Any = 0
    refresh: Any = None
    parallel_by: str = "heads"
    implementation: str = "auto"

    def __post_init__(self) -> None:
        from vmonarch.plan import AttentionPlan, plan_file, plan_names

        object.__setattr__(self, "exact", _exact(self.exact))
        if self.reach is not None:
            _decay(self.reach)
        with _naming_the_option():
            super().__post_init__()
            check_implementation(self.implementation)
            _check_dense(self)
            check_parallel_by(self.parallel_by, **self.not_by_frames, reach=self.reach, plan=self.plan)
        file = None
        if self.plan is not None:
            try:
                AttentionPlan.parse(str(self.plan))
            except (TypeError, ValueError, OSError) as error:
                raise InputError("plan", f"{self.plan!r} cannot be used: {error}") from error
            file = plan_file(self.plan)
        self._fill_in_file("plan", file, self.plan in plan_names())

    def _parameters(self) -> dict[str, Any]:
        """The processor's arguments."""
        parameters = dict(vars(self))
        reach = parameters.pop("reach")
        parameters.pop("plan_sha256")
        return parameters | {"bias": None if reach is None else _decay(reach)}

    @property
    def options(self) -> VMonarchOptions:
        """The options of attention alone."""
        return VMonarchOptions(**{field.name: getattr(self, field.name) for field in OPTION_FIELDS})

    def processor(self) -> VMonarchProcessor:
        """The method as a processor."""
        from vmonarch import VMonarchProcessor

        with _naming_the_option():
            return VMonarchProcessor(**self._parameters())

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if the tiles or exact frames, its own or those of its plan, do not fit the latent grid."""
        from vmonarch.plan import AttentionPlan

        methods = [self.options] if self.plan is None else AttentionPlan.parse(self.plan).methods.values()
        for options in filter(None, methods):
            options.check_grid(grid)


@dataclass(frozen=True)
class FlashBiasAttention(_Kind):
    """Exact attention with a bias that falls off over space and time; see `vmonarch.FlashBiasProcessor`.

    Args:
        reach: along (time, height, width), of a `vmonarch.bias.SpatioTemporalDecay` that all heads share.
        dense_steps, dense_layers: a count, a fraction in (0, 1), or a list of indices that keep attention without it.
    """

    kind: ClassVar[str] = "flashbias"

    reach: tuple[float, float, float] = (16.0, 64.0, 64.0)
    dense_steps: Any = 0
    dense_layers: Any = 0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        _decay(self.reach)
        with _naming_the_option():
            check_implementation(self.implementation)
            _check_dense(self)

    def processor(self) -> FlashBiasProcessor:
        """The method as a processor."""
        from vmonarch import FlashBiasProcessor

        parameters = dataclasses.asdict(self)
        return FlashBiasProcessor(_decay(parameters.pop("reach")), **parameters)


@dataclass(frozen=True)
class BasedAttention(_Kind):
    """Based with what it has learnt; see `vmonarch.BasedProcessor` and `vmonarch.load_adapter`.

    Args:
        adapter: file of `vmonarch.save_adapter`; "embedded" for the one that ships with the embedded model; null for
            parameters that have learnt nothing.
        adapter_sha256: of that file, filled in; given, it is what the file must have.
        layers, feature_dim, feature_map, window, decay, dense_layers: as in `BasedProcessor`. With an adapter they are
            the adapter's, which null stands for; without one null stands for the processor's defaults.
        dense_steps: a count, a fraction in (0, 1), or a list of indices that keep full attention (with the adapter's
            LoRA layers, if it has any).
    """

    kind: ClassVar[str] = "based"

    adapter: str | None = "embedded"
    adapter_sha256: str | None = None
    layers: Any = None
    feature_dim: int | None = None
    feature_map: str | None = None
    window: tuple[int, int, int] | None = None
    decay: bool | None = None
    dense_layers: Any = None
    dense_steps: Any = 0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        from vmonarch.based_options import BasedOptions
        from vmonarch.dense import DenseSet

        given = self._given()
        dense_layers = given.pop("dense_layers", 0)
        with _naming_the_option():
            BasedOptions(**given)
            check_implementation(self.implementation)
            DenseSet("dense_layers", dense_layers)
            DenseSet("dense_steps", self.dense_steps)
        self._fill_in_file("adapter", None if self.adapter is None else self._file(), self.adapter == "embedded")

    @property
    def countable(self) -> bool:
        """No: its layers cannot be made without their learnt weights."""
        return False

    def _given(self) -> dict[str, Any]:
        """What was given of the options that an adapter decides on."""
        names = ("layers", "feature_dim", "feature_map", "window", "decay", "dense_layers")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _file(self) -> Path:
        from vmonarch.pipelines.embedded import embedded_adapter_path

        assert self.adapter is not None
        try:
            file = embedded_adapter_path() if self.adapter == "embedded" else Path(self.adapter).expanduser()
        except FileNotFoundError as error:
            raise self._unusable(error) from error
        if not file.is_file():
            raise self._unusable("there is no such file")
        return file

    def _unusable(self, reason: object) -> InputError:
        return InputError(
            "adapter",
            f"{self.adapter!r} cannot be used: {reason}. Based has to be trained for a model: give adapter=FILE of"
            " vmonarch.save_adapter, or adapter=null for parameters that have learnt nothing",
        )

    def _free(self) -> dict[str, Any]:
        """The options that no adapter decides on."""
        return {"dense_steps": self.dense_steps, "implementation": self.implementation}

    def processor(self) -> BasedProcessor:
        """The method as a processor.

        Raises:
            InputError: it has an adapter, which is loaded together with its processor.
        """
        from vmonarch import BasedProcessor

        if self.adapter is not None:
            problem = f"cannot be 'based' with {self.adapter!r}: vmonarch.load_adapter applies adapters"
            raise InputError("processor", problem)
        return BasedProcessor(**self._given(), **self._free())

    def install(self, pipe: Any) -> None:
        """Put this method on `pipe`, in place of whatever vmonarch method it carries.

        Raises:
            InputError: the adapter does not fit the pipeline, or an option does not fit the adapter.
        """
        from vmonarch import BasedProcessor, load_adapter, restore

        if self.adapter is None:
            super().install(pipe)
            return
        restore(pipe)
        file = self._file()
        try:
            config = BasedProcessor(**self._given()).config
            installed = load_adapter(pipe, file, **self._free())
            learnt = installed.processor.config
            for name in self._given():
                if config[name] != learnt[name]:
                    installed.restore()
                    raise InputError(name, f"is {learnt[name]} in the adapter {self.adapter!r}, got {config[name]}")
        except InputError:
            raise
        except (TypeError, ValueError, ImportError) as error:
            raise self._unusable(error) from error


@dataclass(frozen=True)
class _Variant(_Kind):
    """A function of `vmonarch.variants`; a subclass says which, and its fields are that function's options.

    Args:
        dense_steps, dense_layers: a count, a fraction in (0, 1), or a list of indices that keep full attention.
        refresh: as in `VMonarchAttention`.
    """

    dense_steps: Any = 0
    dense_layers: Any = 0
    refresh: Any = None

    def __post_init__(self) -> None:
        with _naming_the_option():
            self._check_options()
            _check_dense(self)

    def _check_options(self) -> None:
        """Raise TypeError or ValueError if an option of the function cannot be used."""

    def _options(self) -> dict[str, Any]:
        """The function's options."""
        common = {field.name for field in dataclasses.fields(_Variant)}
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name not in common}

    def processor(self) -> VideoAttentionProcessor:
        """The method as a processor."""
        from vmonarch.variants import VariantProcessor

        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Variant)}
        return VariantProcessor(self.kind, self._options(), **common)


@dataclass(frozen=True)
class ControlledMonarch(_Variant):
    """VMonarch attention with cR or cL held at its initial value; see `variants.controlled_attention`.

    Args:
        fix_cr, fix_cl: for which key frames, "none", "first" or "all".
        recompute: answer the rows of the first frame exactly.
    """

    kind: ClassVar[str] = "controlled"

    num_iterations: int = 2
    fix_cr: str = "none"
    fix_cl: str = "none"
    recompute: bool = False
    min_mass: float = 0.1

    def _check_options(self) -> None:
        from vmonarch.variants import check_controlled_options

        check_controlled_options(**self._options())


@dataclass(frozen=True)
class SinkAverageMonarch(_Variant):
    """The mean of exact attention to the first frame and VMonarch attention; `variants.sink_average_attention`."""

    kind: ClassVar[str] = "sink_average"

    num_iterations: int = 2
    min_mass: float = 0.1

    def _check_options(self) -> None:
        VMonarchOptions(**self._options())


@dataclass(frozen=True)
class FactorisedMonarch(_Variant):
    """Monarch attention with blocks along another axis; see `variants.factorised_attention`.

    Args:
        axis: "T", "H" or "W".
        blocks: how many.
        recompute: answer the rows of the first frame exactly.
    """

    kind: ClassVar[str] = "factorised"

    axis: str = "H"
    blocks: int = 4
    num_iterations: int = 2
    recompute: bool = True
    min_mass: float = 0.1

    def _check_options(self) -> None:
        from vmonarch.variants import check_factorised_options

        check_factorised_options(**self._options())

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if there are more blocks than the axis is long."""
        from vmonarch.variants import check_factorised_grid

        check_factorised_grid(grid, self.axis, self.blocks)


@dataclass(frozen=True)
class LocalAttention(_Variant):
    """The exact blocks of a pattern and nothing else; see `variants.local_attention`.

    Args:
        exact: "first_frame" is no choice, it leaves frames without keys; a mapping with rows, columns, band.
    """

    kind: ClassVar[str] = "local"

    exact: Any = dataclasses.field(default_factory=lambda: {"band": 1})

    def _check_options(self) -> None:
        if not isinstance(self.exact, Mapping):
            raise InputError("exact", f"must be a mapping with rows, columns or band, got {self.exact!r}")
        if self.pattern.band is None and not self.pattern.columns:
            raise InputError("exact", f"must have a band or columns, or frames have no keys; got {dict(self.exact)}")

    @property
    def pattern(self) -> ExactBlocks:
        """The exact blocks."""
        pattern = _exact(self.exact)
        assert pattern is not None and not isinstance(pattern, str)
        return pattern

    def _options(self) -> dict[str, Any]:
        return {"exact": self.pattern}

    def check_grid(self, grid: LatentGrid) -> None:
        """Raise ValueError if the pattern names a frame that is not there, or leaves one without keys."""
        from vmonarch.variants import local_key_frames

        local_key_frames(self.pattern, grid.frames)


@dataclass(frozen=True, kw_only=True)
class _OpAttention(_Kind, Options):
    """What the kinds have whose op is all in its options, of the class that they name beside this one.

    Args:
        dense_steps, dense_layers: a count, a fraction in (0, 1), or a list of indices that keep full attention.
        refresh: as in `VMonarchAttention`.
    """

    dense_steps: Any = 0
    dense_layers: Any = 0
    refresh: Any = None
    implementation: str = "auto"

    def __post_init__(self) -> None:
        with _naming_the_option():
            super().__post_init__()
            check_implementation(self.implementation)
            _check_dense(self)


@dataclass(frozen=True, kw_only=True)
class TwoResolutionAttention(_OpAttention, TwoResolutionOptions):
    """Exact attention to the best key tiles and to the means of the others; see `vmonarch.TwoResolutionProcessor`."""

    def processor(self) -> TwoResolutionProcessor:
        """The method as a processor."""
        from vmonarch import TwoResolutionProcessor

        return TwoResolutionProcessor(**vars(self))

    @property
    def options(self) -> TwoResolutionOptions:
        """The options of attention alone."""
        return TwoResolutionOptions(**{field.name: getattr(self, field.name) for field in TWO_RESOLUTION_FIELDS})

    @property
    def countable(self) -> bool:
        """Not with beta: how many tiles exceed the threshold depends on the data."""
        return self.beta is None


@dataclass(frozen=True, kw_only=True)
class FirstOrderAttention(_OpAttention, FirstOrderOptions):
    """Attention to the first order around mean queries; see `vmonarch.FirstOrderProcessor`."""

    def processor(self) -> FirstOrderProcessor:
        """The method as a processor."""
        from vmonarch import FirstOrderProcessor

        return FirstOrderProcessor(**vars(self))

    @property
    def options(self) -> FirstOrderOptions:
        """The options of attention alone."""
        return FirstOrderOptions(parts=self.parts)


@dataclass(frozen=True)
class BlockTopKAttention(_Kind):
    """Block-sparse attention to the key cubes of the highest mean score: two resolutions without the rest.

    Args:
        sparsity: share of key cubes that is dropped.
        cube: (frames, rows, columns) of tokens, at most.
        dense_steps, dense_layers, refresh: as in `TwoResolutionAttention`.

    Source: Zhang et al., VSA: Faster Video Diffusion with Trainable Sparse Attention (2025), §3, without its trained
    coarse branch.
    """

    kind: ClassVar[str] = "block_topk"

    sparsity: float = 0.9
    cube: tuple[int, int, int] = (4, 4, 4)
    dense_steps: Any = 0
    dense_layers: Any = 0
    refresh: Any = None
    implementation: str = "auto"

    def __post_init__(self) -> None:
        with _naming_the_option():
            if isinstance(self.sparsity, bool) or not isinstance(self.sparsity, (int, float)):
                raise TypeError(f"sparsity must be a number, got {self.sparsity!r}")
            if not 0 <= self.sparsity < 1:
                raise ValueError(f"sparsity must be at least 0 and below 1, got {self.sparsity}")
            LatentGrid.parse(self.cube, argument="cube")
            check_implementation(self.implementation)
            _check_dense(self)

    def processor(self) -> TwoResolutionProcessor:
        """The method as a processor."""
        from vmonarch import TwoResolutionProcessor

        options = dict(vars(self))
        share, tile = 1 - options.pop("sparsity"), options.pop("cube")
        return TwoResolutionProcessor(share=share, tile=tile, query_tile=tile, rest=False, **options)


@dataclass(frozen=True)
class NoAttention(_Variant):
    """Nothing but what is reused of exact attention, with `refresh`; see `variants.no_attention`."""

    kind: ClassVar[str] = "none"


def _exact(exact: Any) -> ExactBlocks | str | None:
    """What the ops take as `exact`, of an entry in YAML."""
    if not isinstance(exact, Mapping):
        return exact
    check_keys(ExactBlocks, exact, prefix="exact.")
    try:
        return ExactBlocks(**exact)
    except (TypeError, ValueError) as error:
        raise InputError("exact", f'must be null, "first_frame" or a mapping that fits: {error}') from error


def _replace(pipe: Any, processor: Any) -> None:
    from vmonarch import apply, restore

    # What a method before had learnt is in its file.
    restore(pipe)
    apply(pipe, processor)


@contextlib.contextmanager
def _naming_the_option() -> Iterator[None]:
    """Turn errors of checks, which name the option first ("coarse must be at least 1, got 0"), into `InputError`s."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        argument, _, problem = str(error).partition(" ")
        raise InputError(argument, problem) from error


def _check_dense(
    method: VMonarchAttention | FlashBiasAttention | BlockTopKAttention | _OpAttention | _Variant,
) -> None:
    from vmonarch.dense import DenseSet
    from vmonarch.residuals import Refresh

    DenseSet("dense_steps", method.dense_steps)
    DenseSet("dense_layers", method.dense_layers)
    Refresh.parse(getattr(method, "refresh", None))


def _decay(reach: Any) -> Any:
    from vmonarch.bias import SpatioTemporalDecay

    with _naming_the_option():
        return SpatioTemporalDecay(1, reach)


Parameters = (
    FullAttention
    | VMonarchAttention
    | FlashBiasAttention
    | BasedAttention
    | ControlledMonarch
    | SinkAverageMonarch
    | FactorisedMonarch
    | LocalAttention
    | BlockTopKAttention
    | TwoResolutionAttention
    | FirstOrderAttention
    | NoAttention
)
KINDS: dict[str, type[Parameters]] = {method.kind: method for method in typing.get_args(Parameters)}


@dataclass(frozen=True)
class AttentionMethod:
    """A named method with its parameters.

    Args:
        name: as in `configs/attention/`.
        parameters: of the method's processor.
        label: what tables and videos call it: the name, and the overrides when there are any.
        stack: what a recipe switches on besides; `vmonarch.pipelines.recipes` does it.
    """

    name: str
    parameters: Parameters
    label: str
    stack: Stack = Stack()

    def install(self, pipe: Any) -> None:
        """Leave exactly this method on the Wan pipeline `pipe`."""
        self.parameters.install(pipe)

    def without_dense(self) -> Self:
        """The method with no exact steps: what training has to run, where every noise level is as likely."""
        return dataclasses.replace(self, parameters=self.parameters.without_dense())

    def check_video(self, argument: str, grid: LatentGrid, steps: int, layers: int, why_not_triton: str | None) -> None:
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
                DenseSet(name, getattr(self.parameters, name, None) or 0).contains(0, total)
            refresh = Refresh.parse(getattr(self.parameters, "refresh", None))
            if refresh is not None:
                refresh.schedule(steps)
            self.parameters.check_grid(grid)
            if why_not_triton and getattr(self.parameters, "implementation", "auto") == "triton":
                raise ValueError(f"implementation=triton is not possible: {why_not_triton}; auto and torch are")
        except ValueError as error:
            raise InputError(argument, f"{self.label!r} cannot compute this video: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Name, kind and every parameter, as plain values that `resolve_method` reads back."""
        values = {
            name: value.to_dict() if isinstance(value, ExactBlocks) else value
            for name, value in vars(self.parameters).items()
        }
        return {"name": self.name, "kind": self.parameters.kind, "label": self.label, **values}


@dataclass(frozen=True, kw_only=True)
class Recipe(AttentionMethod):
    """A recipe of `configs/recipes/`: an attention method with a stack of what makes the rest of a video fast."""

    attention: AttentionMethod

    def to_dict(self) -> dict[str, Any]:
        """Name, attention and stack, as plain values that `resolve_method` reads back."""
        stack = {key: dict(value) if isinstance(value, Mapping) else value for key, value in vars(self.stack).items()}
        return {"name": self.name, "label": self.label, "attention": self.attention.to_dict(), **stack}


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
    # The label named the parameters as they were.
    merged = _over({key: value for key, value in below.items() if key != "label"}, above)
    if "attention" in above:
        merged["attention"] = merge_attention(below.get("attention"), above["attention"], recipes=False)
    return merged


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters over others; another kind of cache leaves nothing of the arguments of the one before."""
    merged = deep_merge(below, above)
    if isinstance(cache := above.get("cache"), Mapping) and "kind" in cache:
        merged["cache"] = dict(cache)
    return merged


def method_names() -> list[str]:
    """Names of the methods that ship in `configs/attention/`."""
    return preset_names("attention")


def recipe_names() -> list[str]:
    """Names of the recipes that ship in `configs/recipes/`."""
    return preset_names("recipes")


def _name_now(name: Any, values: Mapping[str, Any], argument: str) -> Any:
    """What a method or recipe is called now, by a name that may be an old one; warns unless `to_dict` wrote `values`.

    Raises:
        InputError: the name was a recipe's and is a method's now, and has what only recipes have.
    """
    if not isinstance(name, str):
        return name
    attention = values.get("attention")
    if name in OLD_RECIPES and isinstance(attention, Mapping) and "kind" in attention:
        return OLD_RECIPES[name]
    if name in OLD_RECIPES:
        for key in values:
            if key == "attention" or key in {field.name for field in dataclasses.fields(Stack)}:
                problem = f"is for recipes, and {name!r} is a method: the recipe is called {OLD_RECIPES[name]!r} now"
                raise InputError(f"{argument}.{key}", problem)
        note = f"{name!r} is an attention method; the recipe that had this name is {OLD_RECIPES[name]!r}"
    else:
        note = f"{name!r} is called {OLD_METHODS.get(name)!r} now; the next release does not know the old name"
    if "kind" not in values and (name in OLD_METHODS or (argument == "recipe" and name in OLD_RECIPES)):
        warnings.warn(note, FutureWarning, stacklevel=3)
    return OLD_METHODS.get(name, name)


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


def with_options(word: str, options: str) -> str:
    """A word of `resolve_method` with further options in its own form, "a=1,b=2"; none if "" is given."""
    return word + (options and f"{',' if ':' in word else ':'}{options}")


def resolve_method(
    spec: str | Mapping[str, Any], *, argument: str = "attention", recipes: bool = False
) -> AttentionMethod:
    """The method that `spec` names: `name`, `name:key=value,key=value`, or a mapping with `name` and parameters.

    Args:
        recipes: whether it may be a recipe; for callers that do what its stack says.

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
    before, name = name, _name_now(name, spec if isinstance(spec, Mapping) else values, argument)
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
    schema = KINDS[shipped.pop("kind")]
    if not dataclasses.fields(schema) and values:
        raise InputError(f"{argument}.{next(iter(values))}", f"is no known key: {name} attention has no parameters")
    parameters = build(schema, deep_merge(shipped, values), prefix=f"{argument}.")
    if not label:
        label = _label(name, values, {field.name: field.default for field in dataclasses.fields(schema)} | shipped)
    return AttentionMethod(name=name, parameters=parameters, label=label)


def _label(name: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """The name, and the values that are not the defaults."""
    changed = {key: value for key, value in values.items() if defaults[key] != value}
    return name + (":" if changed else "") + ",".join(f"{key}={value}" for key, value in changed.items())


def _recipe(name: str, values: Mapping[str, Any], label: str, argument: str) -> Recipe:
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
    return Recipe(name, method.parameters, label, stack, attention=method)
