"""The base of all attention processors for video transformers: their common options, and the stack built from them.

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

# An option whose text is longer is printed as the name of its type.
_LONG = 80


class Layer(NamedTuple):
    """The place of a processor: one self-attention module of the video.

    Args:
        attn: the module.
        place: its number among these modules of the transformer, in the order of the blocks.
        block: the number of its block; `blocks`: how many blocks the transformer has.
        family, transformer: those of the model; None in an engine other than diffusers.
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
    """Base of the processors: options, from which `apply` builds an attention stack for every self-attention module.

    A subclass that also inherits the options of an op, `OP`, computes that op. A subclass that computes something else
    overrides `attention`.

        vmonarch.apply(pipe, processor)
        pipe.set_attn_processor(processor)    # or pipe.transformer.set_attn_processor: the same

    Args:
        dense_steps, dense_layers, refresh: see `VMonarchProcessor`.
        grid: the latent grid, (frames, height, width) in tokens; None to read it from the transformer's calls.
        implementation: of the ops: "auto", "triton" or "torch".

    Attributes:
        bias: what makes the factors of the bias, in processors that have one.
        options: the op's options alone.
    """

    # Processors are compared by identity, whatever their options.
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
        # A processor never changes; copies of a model share its bias, which may learn.
        return self

    @property
    def bias_option(self) -> BiasOption | None:
        """The bias, for elements of the stack."""
        return None if self.bias is None else BiasOption(self.bias)

    def attention(self, layer: Layer) -> Attend | None:
        """Attention of the video's tokens in this layer; None leaves the module's own processor in place."""
        return Op(self.options, self.implementation)

    @property
    def exact_attention(self) -> Attend:
        """What `attention` approximates, for any tokens."""
        return Exact(self.implementation, self.bias_option)

    def stack(self, layer: Layer) -> Attend | None:
        """The attention stack of a layer, without the elements that no option needs."""
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
        """Whether torch.compile sees one operator for all layers of a transformer."""
        return self.refresh is not None

    def bind(self, layer: Layer, original: Any) -> Any:
        """What an attention module gets in place of its processor `original`, or `original` itself.

        Raises:
            RuntimeError: beyond the Wan family: the class of `original`, or its version of diffusers, is not known.
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
        """An attention module calls its processor here if nobody has applied it.

        Raises:
            RuntimeError: always; a single module knows neither the video's grid nor its layer nor the step.
        """
        raise RuntimeError(
            f"{type(self).__name__} was set on a single attention module, which tells neither grid nor layer nor step:"
            " use vmonarch.apply(pipe_or_transformer, processor), or set_attn_processor of the pipeline or transformer"
        )

    def check_context_parallel(self, config: Any, heads: int, joint: bool = False) -> None:
        """Check that self-attention with this number of heads works under diffusers' `ContextParallelConfig`.

        Args:
            joint: whether the model is beyond the Wan family, where all attention of the video is ours.

        Raises:
            NotImplementedError: ring attention.
            ValueError: there are fewer heads than ranks; or the model's own attention, which `dense_steps` and
                `dense_layers` keep, cannot share them.
        """
        check_ring(config.ring_degree, "ContextParallelConfig(ulysses_degree=…)")
        ranks = config.ulysses_degree
        check_heads(ranks, heads)
        # diffusers pads heads to a multiple of the ranks, by fewer than a rank then has.
        padded = -heads % ranks < -(-heads // ranks)
        uneven = heads % ranks and not (config.ulysses_anything and padded)
        for name in ("dense_steps", "dense_layers") if uneven and not joint else ():
            if getattr(self, name):
                raise ValueError(
                    f"{name} keeps the model's own attention, which shares heads evenly: its {heads} do not divide by"
                    f" ulysses_degree={ranks}; use {'ulysses_anything=True or ' if padded else ''}{name}=0"
                )

    def check_run(self, grid: LatentGrid, steps: int, layers: int) -> None:
        """Raise ValueError if an option does not fit a run of `steps` steps with a transformer of `layers` layers."""
        is_dense("dense_steps", self.dense_steps, 0, steps)
        is_dense("dense_layers", self.dense_layers, 0, layers)
        if self.refresh is not None:
            self.refresh.schedule(steps)
        self.check_grid(grid)

    def check_grid(self, grid: LatentGrid) -> None:
        self.options.check_grid(grid)

    def warn_of_size(self, grid: LatentGrid) -> None:
        """Warn of what users may not expect at this grid, with which the transformer is about to be called."""

    @property
    def needs_raster(self) -> bool:
        """Whether the method depends on rows and columns, not on frames alone."""
        return True

    @property
    def config(self) -> dict[str, Any]:
        """The options as JSON values, from which `VMonarchProcessor(**config)` makes an equal processor."""
        config = {option.name: as_json(getattr(self, option.name)) for option in fields(self) if option.init}
        bias = self.bias_option
        return config if bias is None else config | {"bias": bias.config()}

    def __repr__(self) -> str:
        """The options that are not the defaults; of a plan or a long value, the type."""
        shown = []
        for name, value in self.changed().items():
            text = repr(value)
            shown.append(f"{name}={text if len(text) < _LONG else type(value).__name__}")
        return f"{type(self).__name__}({', '.join(shown)})"


class FullAttentionProcessor(VideoAttentionProcessor):
    """Exact attention that ranks share as they share our methods: any number of heads, forward and backward.

    diffusers' own attention shares heads evenly, and its backward pass needs query, key and value of one dtype, which
    autocast breaks: it computes the norms of query and key in float32.
    """

    def attention(self, layer: Layer) -> Attend:
        return Exact()

    def around(self, original: Any) -> Own:
        """This attention for a module of the Wan family, in place of its processor `original`."""
        return Own(self, Exact(), original)

    @property
    def needs_raster(self) -> bool:
        return False
