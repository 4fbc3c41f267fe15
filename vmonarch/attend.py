"""The attention stack: small callables of one shape, each of which may call the next.

    Attend = (query, key, value [B, S, H, D], Call) -> (out [B, S, H, E], lse [B, H, S] or None)

`Op`, `Exact` and `ByHead` return lse where `call.lse` asks for it; elements above `Beside` are never asked.
`VideoAttentionProcessor.stack` builds the stack once per layer, from the elements that the options need, top to bottom:

    Share      ranks that hold some tokens of all heads attend with all tokens of some heads (added by each call)
    Opaque     one operator for torch.compile (`vmonarch.opaque`)
    Residual   exact in some steps; approximate, plus the last residual, in the others
    Beside     other tokens beside the video's: text, sound
    ByHead     a method for every head
    Op         an op on the video's tokens; Exact: softmax over any tokens

They are frozen dataclasses, which can be printed, copied, pickled and compiled; closures can only be compiled.

Shapes: B batch, S tokens, of which N = T·H·W are the video's, H heads, D head dim, E value dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.bias import BiasOption
from vmonarch.call import Call
from vmonarch.context_parallel import Part, balanced_heads, in_words, places_of, split_evenly
from vmonarch.engines import CUDNN, FA3
from vmonarch.kernels.common.launch import auto_takes_kernels, carry_tangents, learns
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.flash_entropy.api import flash_entropy_attention
from vmonarch.kernels.int8.api import int8_attention
from vmonarch.kernels.merge.api import merge_partials
from vmonarch.kernels.residual.api import add_residual
from vmonarch.options import Options
from vmonarch.plan import method_attention, method_flops

# (out, lse or None)
Result = tuple[torch.Tensor, Any]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Call], Result]


def no_others(call: Call) -> bool:
    """Whether the sequence holds the video's tokens alone; False where torch.compile does not know their number."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(call.others == 0)


@dataclass(frozen=True)
class Op:
    """One of our ops on the video's tokens; the class of its options selects it. The bias is optional."""

    options: Options
    implementation: str = "auto"
    bias: BiasOption | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        given: dict[str, Any] = {"grid": call.grid, "return_lse": call.lse, "implementation": self.implementation}
        if self.bias is not None:
            given["bias"] = self.bias.factors(call.grid, query.device, call.heads)
        found = method_attention(query, key, value, self.options, **given)
        return found if call.lse else (found, None)


# Added to a logit, it makes the weight vanish beside any other; float16 can hold it.
_NEVER = -3e4


@dataclass(frozen=True)
class Exact:
    """Softmax over any tokens: by the user's attention backend, or by our kernels for a mask or the log-partition.

    If `call.precision` is "int8", `int8_attention` computes it. A low-rank bias covers the video's tokens alone.
    A sample without any key has a log-partition far below all others.
    """

    implementation: str = "auto"
    bias: BiasOption | None = None

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        mask, by = call.key_mask, self.implementation
        if self.bias is not None:
            factors: Sequence[torch.Tensor] = self.bias.factors(call.grid, query.device, call.heads)
            if not no_others(call):
                factors = [call.padded(factor) for factor in factors]
            given: dict[str, Any] = {"key_mask": mask, "return_lse": call.lse, "implementation": by}
            found = flash_bias_attention(query, key, value, *factors, **given)
            return found if call.lse else (found, None)
        if call.precision == "int8":
            found = int8_attention(query, key, value, key_mask=mask, return_lse=call.lse, implementation=by)
            return found if call.lse else (found, None)
        ours = call.backend is None and by != "torch" and auto_takes_kernels(query.device)
        if mask is not None and (call.lse or ours):
            # The mask becomes a bias of rank 1: the kernels for Hopper take a bias, but no mask.
            ones = query.new_ones(1, 1, 1, 1).expand(1, query.shape[1], 1, 1)
            penalty = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, _NEVER)[:, :, None, None]
            return flash_bias_attention(query, key, value, ones, penalty, return_lse=True, implementation=by)
        backend = getattr(call.backend, "value", call.backend)
        if call.lse and backend != FA3:
            return flash_entropy_attention(query, key, value, implementation=by)[:2]
        if mask is None and backend == CUDNN:
            return _by_cudnn(query, key, value), None
        # Imported here, because options are checked without diffusers.
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        pairs = None if mask is None else mask[:, None, None]
        more = {"return_lse": True} if call.lse else None
        found = dispatch_attention_fn(query, key, value, pairs, attention_kwargs=more, backend=call.backend)
        return found if call.lse else (found, None)


def _by_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What diffusers computes with cuDNN, without its copies: cuDNN reads [B, S, H, D] as it lies."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@dataclass(frozen=True)
class ByHead:
    """A method for each of the module's heads, as a plan names them; heads of one method are computed together."""

    methods: Mapping[str, Attend]
    heads: tuple[str, ...]

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        names = self.heads if call.heads is None else tuple(self.heads[head] for head in call.heads.own)
        groups = {name: tuple(h for h, other in enumerate(names) if other == name) for name in dict.fromkeys(names)}
        found = []
        for name, own in groups.items():
            q, k, v = (_some_heads(x, own) for x in (query, key, value))
            found.append(self.methods[name](q, k, v, call))
        if len(groups) == 1:
            return found[0]
        out = _side_by_side(_in_order(groups, _wide(*(out for out, _ in found)), 2), query.dtype)
        return out, torch.cat(_in_order(groups, [lse for _, lse in found], 1), 1) if call.lse else None


@dataclass(frozen=True)
class Beside:
    """Other tokens beside the video's, in one softmax with them: [before | T·H·W video | after].

    The video's queries attend to its keys by `video` and to all other keys exactly; other queries attend exactly. The
    softmax over both kinds of keys is the mean of the softmaxes over each, weighted by their partition functions.
    Where `video` is VMonarch attention, its partition function is a lower bound, e^{-KL} of the true one, so the other
    keys weigh e^{KL} times too much.

    Args:
        video: attention of the video's tokens alone, with its log-partition.
    """

    video: Attend
    exact: Exact

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        if no_others(call):
            return self.video(query, key, value, call)
        # torch.compile cannot see a count that only the device knows.
        torch._check(call.others > 0)
        alone = call._replace(before=0, after=0, key_mask=None, lse=True)
        queries = call.video(query)
        to_video = self.video(queries, call.video(key), call.video(value), alone)
        mask = None if call.key_mask is None else call.beside(call.key_mask)
        to_others = self.exact(queries, call.beside(key), call.beside(value), alone._replace(key_mask=mask))
        merged, _ = merge_partials(to_video, to_others, implementation=self.exact.implementation)
        rows, _ = self.exact(call.beside(query), key, value, call)
        return call.joined(merged, rows), None


@dataclass(frozen=True)
class Residual:
    """Exact attention in some steps; in the others, approximate attention plus its residual in the last exact step.

    Args:
        layer: its number, or another key that no other layer of the transformer has.

    Source: Yuan et al., DiTFastAttn (2024); see `vmonarch.residuals`.
    """

    approximate: Attend
    exact: Attend
    layer: Any
    implementation: str = "auto"

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        if call.branch is None:
            raise RuntimeError("refresh needs forward calls of the transformer itself; use refresh=None for its parts")
        branch = call.branch
        layer = branch.layer_of(self.layer, len(query))
        approximate = lambda: self.approximate(query, key, value, call)[0]
        residual = branch.residual_of(layer)
        if residual is not None:
            return add_residual(approximate(), residual, implementation=self.implementation), None
        precision = branch.schedule.precision(branch.schedule.step)
        exact, _ = self.exact(query, key, value, call._replace(precision=precision))
        branch.group = None if call.split is None else call.split.group
        branch.renew(layer, exact, approximate, self.implementation)
        return exact, None


@dataclass(frozen=True)
class Share:
    """Ranks that hold some tokens of all heads attend with all tokens of some heads: one all-to-all in, one out."""

    inner: Attend

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Call) -> Result:
        split, total = call.split, query.shape[2]
        assert split is not None
        heads = self._heads_of_ranks(call, len(split.tokens), total, query.shape[3])
        sizes, order = tuple(map(len, heads)), tuple(itertools.chain(*heads))
        mask = None if call.key_mask is None else split.whole_mask(call.key_mask)
        query, key, value = split.gather_tokens(sizes, *(_some_heads(x, order) for x in (query, key, value)))
        call = call._replace(heads=Part(heads[split.rank], total), key_mask=mask)
        out = split.gather_heads(sizes, self.inner(query, key, value, call)[0])
        return _some_heads(out, tuple(map(order.index, range(total)))), None

    def _heads_of_ranks(self, call: Call, ranks: int, total: int, head_dim: int) -> Sequence[Sequence[int]]:
        """By rank: a plan's heads are balanced by FLOPs; where steps are exact, also evenly by number."""
        method, sizes = method_of(self.inner), split_evenly(total, ranks)
        if isinstance(method, ByHead) and len(set(method.heads)) > 1:
            options = (getattr(method.methods[name], "options", None) for name in method.heads)
            flops = [method_flops(of, call.grid, head_dim) for of in options]
            return balanced_heads(flops, ranks, total if call.branch is None else max(sizes))
        return [places_of(sizes, rank) for rank in range(ranks)]


def method_of(element: Any) -> Any:
    """The element of a stack that attends to the video's tokens by the processor's method."""
    while (below := next((n for n in ("inner", "approximate", "video") if hasattr(element, n)), None)) is not None:
        element = getattr(element, below)
    return element


def stack_lines(element: Any, name: str = "") -> Iterator[str]:
    """An element and all below it, a line for each, top to bottom; of options those that are not the defaults."""
    own: list[str] = []
    below: dict[str, Any] = {}
    for field in dataclasses.fields(element):
        value = getattr(element, field.name)
        if isinstance(value, Mapping):
            below |= value
        elif dataclasses.is_dataclass(value) and callable(value):
            below[field.name] = value
        elif isinstance(value, Options):
            changed = ", ".join(f"{name}={option!r}" for name, option in value.changed().items())
            own.append(f"{type(value).__name__}({changed})")
        elif field.repr and value != field.default:
            own.append(f"{field.name}={value!r}")
    yield f"{name and name + ': '}{type(element).__name__}({', '.join(own)})"
    for name, part in below.items():
        yield from (f"  {line}" for line in stack_lines(part, name))


def _in_order(groups: dict[str, tuple[int, ...]], of_groups: Sequence[Any], dim: int) -> list[torch.Tensor]:
    """Single heads, cut along `dim` from tensors of groups of heads, in the order of the heads."""
    parts: dict[int, torch.Tensor] = {}
    for own, x in zip(groups.values(), of_groups, strict=True):
        parts |= zip(own, x.split(1, dim), strict=True)
    return [parts[head] for head in range(len(parts))]


def _side_by_side(heads: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Heads [B, S, 1, D], which may be `_wide`, as [B, S, H, D]."""
    joined = torch.cat(heads, 2)
    return joined if joined.dtype == dtype else joined.view(dtype)


def _wide(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views as numbers of 16 bytes, if all tensors allow it: torch copies single heads of these at full bandwidth."""
    if torch.compiler.is_compiling() or learns(*tensors) or carry_tangents(*tensors):
        # Compiled copies are fast as they are, and a view as another dtype has no gradient and no tangent.
        return tensors
    return tuple(x.view(torch.complex128) for x in tensors) if all(map(in_words, tensors)) else tensors


def _some_heads(x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
    """Some heads of [B, S, H, D]: a view, where they lie evenly apart and need no gradient."""
    if heads == tuple(range(x.shape[2])):
        return x
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    places = range(heads[0], heads[-1] + 1, step)
    if heads == tuple(places) and not learns(x):
        return x[:, :, places.start : places.stop : step]
    # The gradient of a slice is as large as all heads, and an index would be copied from the CPU, which no CUDA graph
    # can record.
    parts = _wide(x)[0].split(1, 2)
    return _side_by_side([parts[head] for head in heads], x.dtype)
