"""Context parallelism in a transformer to which one of our processors is applied.

In the Wan family diffusers' own `enable_parallelism` works. On other transformers `apply` replaces that method.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from vmonarch.base import VideoAttentionProcessor
from vmonarch.borrowed import Borrowed
from vmonarch.call import current_call
from vmonarch.context_parallel import context_parallel_config, own_tokens
from vmonarch.engines import GROUPS, import_xfuser, ulysses_rank
from vmonarch.families import Family, Spread, heads_of, known_family


def _config_of(transformer: Any) -> Any:
    """diffusers' `ContextParallelConfig` of a transformer; None without one."""
    return context_parallel_config(getattr(transformer, "_parallel_config", None))


def _spread_of(transformer: Any) -> Spread:
    """How the tokens of a transformer beyond the Wan family are spread over ranks; an error if they cannot be."""
    spread = known_family(transformer).spread
    if spread is None:
        raise NotImplementedError(f"context parallelism is not supported with {type(transformer).__name__}")
    return spread


def _has_our_cp_plan(transformer: Any) -> bool:
    """Whether context parallelism spreads the tokens of such a transformer by one of our `cp_plan`s."""
    spread = known_family(transformer).spread
    return spread is not None and spread.cp_plan is not None


def check_parallelism(transformer: Any, processor: VideoAttentionProcessor, applied: bool) -> None:
    """Check that a processor can be applied to a transformer that may be parallel already.

    Args:
        applied: whether another processor is applied.

    Raises:
        NotImplementedError: it runs with ring attention, or context parallelism does not support its model.
        ValueError: its ranks cannot share its heads, or its tokens are not spread by our plan.
    """
    config, family = _config_of(transformer), known_family(transformer)
    if config is None:
        return
    if not applied and not family.own and _spread_of(transformer).cp_plan is not None:
        raise ValueError(
            f"enable_parallelism has spread the tokens of a {type(transformer).__name__} in another way than"
            " vmonarch.apply needs: load it again, and apply before enable_parallelism"
        )
    for _, attn in family.layers(transformer):
        processor.check_context_parallel(config, heads_of(attn), joint=not family.own)


def has_hook(transformer: Any, name: str) -> bool:
    """Whether a module of the transformer has the hook of diffusers with this name."""
    registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
    return any(found is not None and found.get_hook(name) is not None for found in registries)


def check_no_first_block_cache(transformer: Any) -> None:
    """Raise NotImplementedError if ranks share tokens and First Block Cache may skip blocks."""
    in_xfuser = type(transformer).__module__.startswith("xfuser.")
    if _config_of(transformer) is None and not (in_xfuser and ulysses_rank(import_xfuser(GROUPS))[0] > 1):
        return
    if has_hook(transformer, "fbc_leader_block_hook"):
        raise NotImplementedError(
            "First Block Cache is not supported under context parallelism: each rank decides by its own tokens"
            " whether to skip blocks, and ranks that decide differently wait for each other for ever;"
            " disable_cache, and use one that does not look at the tokens, such as MagCacheConfig"
        )


def enable_parallelism(transformer: Any, *, config: Any, cp_plan: Any = None) -> None:
    """`enable_parallelism` of a transformer beyond the Wan family to which one of our processors is applied.

    Raises:
        NotImplementedError: ring attention, or a model that is not supported.
        ValueError: ranks cannot share the heads, or a `cp_plan` is given.
    """
    from diffusers import ContextParallelConfig

    enable = functools.partial(type(transformer).enable_parallelism, transformer, config=config)
    parallel = config if isinstance(config, ContextParallelConfig) else context_parallel_config(config)
    if parallel is None:
        return enable(cp_plan=cp_plan)
    family, spread = known_family(transformer), _spread_of(transformer)
    if cp_plan is not None:
        raise ValueError("cp_plan must be left alone while a processor of vmonarch is applied, which brings its own")
    for attn in _sharing(transformer):
        if isinstance(attn.processor, Borrowed):
            attn.processor.spec.check_context_parallel(parallel, heads_of(attn), joint=True)
        elif (heads := heads_of(attn)) % parallel.ulysses_degree and not parallel.ulysses_anything:
            raise ValueError(
                "attention beside the video's to itself stays the model's own, which shares heads evenly: its"
                f" {heads} do not divide by ulysses_degree={parallel.ulysses_degree}; use ulysses_anything=True"
            )
    enable(cp_plan=None if spread.cp_plan is None else spread.cp_plan(transformer.config))
    share_parallel_config(transformer)
    # Blocks must get the number of the video's first tokens on this rank.
    for block in family.blocks_of(transformer):
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        if spread.leading in names:
            hook = functools.partial(_count_own, names.index(spread.leading), family)
            block.register_forward_pre_hook(hook)


def share_parallel_config(transformer: Any) -> None:
    """Give the parallel config to the attention processors that need it, and remove it from all others."""
    if _config_of(transformer) is not None:
        sharing = set(_sharing(transformer))
        for module in _with_parallel_config(transformer):
            module.processor._parallel_config = transformer._parallel_config if module in sharing else None


def _sharing(transformer: Any) -> list[Any]:
    """The attention modules whose heads ranks share: all by diffusers' plans; by ours, those with split keys."""
    if _has_our_cp_plan(transformer):
        return known_family(transformer).sharing(transformer)
    return _with_parallel_config(transformer)


def _with_parallel_config(transformer: Any) -> list[Any]:
    modules = transformer.modules()
    return [module for module in modules if hasattr(getattr(module, "processor", None), "_parallel_config")]


def check_restorable(transformer: Any) -> None:
    """Raise RuntimeError if tokens are spread in a way that makes the model's own attention wrong."""
    if _config_of(transformer) is not None and _has_our_cp_plan(transformer):
        raise RuntimeError(
            f"a {type(transformer).__name__} cannot be restored under context parallelism: its tokens are spread by a"
            " plan of vmonarch's, with which its own attention would be wrong; load it again"
        )


def _count_own(position: int, family: Family, block: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook of a block, args (video, others, …): cut the number of tokens at `position` to this rank's."""
    attn: Any
    (attn,) = family.attention_in(block)
    own = own_tokens(context_parallel_config(attn.processor._parallel_config), current_call().grid.tokens)
    count = min(max(args[position] - own.start, 0), len(own))
    return (*args[:position], count, *args[position + 1 :])
