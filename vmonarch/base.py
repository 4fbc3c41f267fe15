"""What all attention processors for video transformers in diffusers share: their options, and what is built of them.

Shapes: B batch, S tokens, of which N = T·H·W are the video's, H heads, D head dim; the latent grid is T frames × H rows
× W columns of tokens. In most models, and in all of the Wan family, S = N.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple, Self

from vmonarch.attend import Attend, Beside, Exact, Op, Residual
from vmonarch.bias import BiasOption
from vmonarch.borrowed import borrow
from vmonarch.configs import as_json
from vmonarch.context_parallel import check_heads, check_ring
from vmonarch.families import Family, heads_of
from vmonarch.grid import LatentGrid
from vmonarch.opaque import Opaque
from vmonarch.options import Options
from vmonarch.own import Own
from vmonarch.refresh import Refresh
from vmonarch.validation import check_dense, check_implementation, is_dense

# Of options that are printed, text that is longer is their type's name.
_LONG = 80


class Layer(NamedTuple):
    """Where a processor is put: one self-attention module of the video.

    Args:
        attn: the module.
        place: its number among those of the transformer, in the order of its blocks.
        block: the number of the transformer's block that it is in; `blocks`: how many there are.
        family, transformer: of the model; None in an engine other than diffusers.
        component: the name of the transformer in its pipeline.
    """

    attn: Any
    place: int
    block: int
    blocks: int
    family: Family | None = None
    transformer: Any = None
    component: str = "transformer"

    @property
    def heads(self) -> int:
        """H."""
        return heads_of(self.attn)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VideoAttentionProcessor(Options):
    """Base of the processors: options, of which `apply` makes an attention stack for every self-attention module.

    A subclass of this and of the options of an op, `OP`, has both, and computes that op. What is no op of ours defines
    `attention`.

        vmonarch.apply(pipe, processor)
        pipe.set_attn_processor(processor)    # or pipe.transformer.set_attn_processor: the same

    Args:
        dense_steps, dense_layers, refresh: see `VMonarchProcessor`.
        grid: the latent grid, (frames, height, width) in tokens; None to learn it from the transformer.
        implementation: what the ops are given: "auto", "triton" or "torch".

    Attributes:
        bias: what makes the factors of the bias, for processors that have one.
        options: those of the op alone.
    """

    # Each is itself alone, whatever its options.
    __eq__, __hash__ = object.__eq__, object.__hash__

    OP: ClassVar[type[Options]] = Options
    # Whether bound processors have parameters.
    LEARNS = False

    dense_steps: Any = 0
    dense_layers: Any = 0
    refresh: Any = None
    grid: Any = None
    implementation: str = "auto"
    bias: Any = field(default=None, init=False)
    options: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_implementation(self.implementation)
        for name in ("dense_steps", "dense_layers"):
            object.__setattr__(self, name, check_dense(name, getattr(self, name)))
        object.__setattr__(self, "refresh", Refresh.parse(self.refresh))
        if self.grid is not None:
            object.__setattr__(self, "grid", LatentGrid.parse(self.grid))
        if self.bias is not None:
            object.__setattr__(self, "bias", BiasOption(self.bias).bias)
        of_op = {option.name: getattr(self, option.name) for option in fields(self.OP)}
        object.__setattr__(self, "options", self.OP(**of_op))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # It does not change; copies of a model share its bias, which may learn.
        return self

    @property
    def bias_option(self) -> BiasOption | None:
        """The bias, for elements of the stack."""
        return None if self.bias is None else BiasOption(self.bias)

    def attention(self, layer: Layer) -> Attend | None:
        """What the layer computes of the video's tokens; None to leave the module's own processor as it is."""
        return Op(self.options, self.implementation)

    @property
    def exact_attention(self) -> Attend:
        """What `attention` approximates, of any tokens."""
        return Exact(self.implementation, self.bias_option)

    def stack(self, layer: Layer) -> Attend | None:
        """The attention stack of a layer: an element that no option needs is not in it."""
        attend, exact = self.attention(layer), self.exact_attention
        if attend is None:
            return None
        joint = layer.family is not None and not layer.family.own
        if joint and not isinstance(attend, Exact):
            attend = Beside(attend, Exact(self.implementation))
        if self.refresh is not None:
            attend = Residual(attend, exact, layer.place, self.implementation)
        return Opaque(attend) if self.is_opaque(layer) else attend

    def is_opaque(self, layer: Layer) -> bool:
        """Whether torch.compile is to see one operator for all layers of a transformer."""
        return self.refresh is not None

    def bind(self, layer: Layer, original: Any) -> Any:
        """What an attention module gets in place of its processor `original`; that itself, to leave it as it is.

        Raises:
            RuntimeError: beyond the Wan family: `original` is of a class, or a version of diffusers, that is not known.
        """
        attend = self.stack(layer)
        if attend is None:
            return original
        assert layer.family is not None
        if layer.family.own:
            return Own(self, attend, original)
        videos = layer.family.videos(layer.transformer.config, layer.block, layer.blocks)
        return borrow(self, attend, original, layer.family, videos=videos)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """An attention module calls its processor.

        Raises:
            RuntimeError: always; a single module tells neither the video's grid nor its layer nor the step.
        """
        raise RuntimeError(
            f"{type(self).__name__} was set on a single attention module, which tells neither grid nor layer nor step:"
            " use vmonarch.apply(pipe_or_transformer, processor), or set_attn_processor of the pipeline or transformer"
        )

    def check_context_parallel(self, config: Any, heads: int, joint: bool = False) -> None:
        """Check that self-attention with this number of heads works under diffusers' `ContextParallelConfig`.

        Args:
            joint: whether the model is beyond the Wan family, so that all attention of the video is ours.

        Raises:
            NotImplementedError: ring attention.
            ValueError: there are fewer heads than ranks; or the model's own attention, which `dense_steps` and
                `dense_layers` keep, cannot share them.
        """
        check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
        ranks = config.ulysses_degree
        check_heads(ranks, heads)
        for name in ("dense_steps", "dense_layers") if heads % ranks and not config.ulysses_anything else ():
            if not joint and getattr(self, name):
                raise ValueError(
                    f"{name} keeps the model's own attention, which shares heads evenly: its {heads} do not divide by"
                    f" ulysses_degree={ranks}; use ulysses_anything=True or {name}=0"
                )

    def check_run(self, grid: LatentGrid, steps: int, layers: int) -> None:
        """Raise ValueError if an option does not fit a run of so many steps of a transformer with so many layers."""
        is_dense("dense_steps", self.dense_steps, 0, steps)
        is_dense("dense_layers", self.dense_layers, 0, layers)
        if self.refresh is not None:
            self.refresh.schedule(steps)
        self.check_grid(grid)

    def check_grid(self, grid: LatentGrid) -> None:
        self.options.check_grid(grid)

    def warn_of_size(self, grid: LatentGrid) -> None:
        """Warn of what a user may not expect of videos of this grid, which the transformer is called with next."""

    @property
    def needs_raster(self) -> bool:
        """Whether the method knows rows and columns, and not only frames."""
        return True

    @property
    def config(self) -> dict[str, Any]:
        """The options as JSON-serialisable values, of which another can be made: `VMonarchProcessor(**config)`."""
        config = {option.name: as_json(getattr(self, option.name)) for option in fields(self) if option.init}
        bias = self.bias_option
        return config if bias is None else config | {"bias": bias.config()}

    def __repr__(self) -> str:
        """The options that are not the defaults; of plans and long ones the type."""
        shown = []
        for name, value in self.changed().items():
            text = repr(value)
            shown.append(f"{name}={text if len(text) < _LONG else type(value).__name__}")
        return f"{type(self).__name__}({', '.join(shown)})"


class FullAttentionProcessor(VideoAttentionProcessor):
    """Exact attention, which ranks share as all these processors do: any number of heads, forward and backward.

    diffusers' own shares heads evenly, and its backward pass wants query, key and value of one dtype, which autocast
    does not leave them: it computes the norms of query and key in float32.
    """

    def attention(self, layer: Layer) -> Attend:
        return Exact()

    def around(self, original: Any) -> Own:
        """It in place of the processor of a module of the Wan family, of which it needs to know no more."""
        return Own(self, Exact(), original)

    @property
    def needs_raster(self) -> bool:
        return False
