"""What is switched on besides attention to make a video fast: a part of a recipe (`configs/recipes/`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vmonarch.configs import InputError, suggest

# Names of torchao's configurations: products in float8 with scales of rows, and weights alone in float8.
LINEARS = ("float8", "float8-weights")
# Of diffusers, by the name before `CacheConfig`.
CACHES = {"first_block": "FirstBlock", "mag": "Mag", "sea": "Sea", "taylorseer": "TaylorSeer"}


@dataclass(frozen=True)
class Stack:
    """What is switched on besides attention; `vmonarch.pipelines.recipes` does it.

    Args:
        compile: compile the transformer's blocks, and on a GPU let cuDNN compute exact attention.
        linears: "float8" computes the blocks' linear layers in float8, which needs Ada, Hopper or newer;
            "float8-weights" only keeps their weights so. Both need torchao. None: the model's own type.
        cache: None, or a step cache of diffusers: a mapping with `kind`, one of `CACHES`, and arguments of that class
            (`diffusers.TaylorSeerCacheConfig`, …). "taylorseer" predicts the transformer's output (its lite mode).

    Raises:
        InputError: an unknown kind of cache or of linear layers, or a cache without its kind.
    """

    compile: bool = False
    linears: str | None = None
    cache: Any = None

    def __post_init__(self) -> None:
        if self.linears not in (None, *LINEARS):
            raise InputError("linears", f"must be null or one of {', '.join(LINEARS)}, got {self.linears!r}")
        if self.cache is None:
            return
        known = ", ".join(CACHES)
        if not isinstance(self.cache, Mapping) or "kind" not in self.cache:
            raise InputError("cache", f"must be null or a mapping with a kind of {known}, got {self.cache!r}")
        if (kind := self.cache["kind"]) not in CACHES:
            raise InputError("cache.kind", f"must be one of {known}, got {kind!r}{suggest(str(kind), CACHES)}")

    def __bool__(self) -> bool:
        return self != Stack()

    @property
    def predictable(self) -> bool:
        """Whether the steps that the cache skips depend on nothing but their number."""
        return self.cache is None or self.cache["kind"] == "taylorseer"

    def skips(self, call: int) -> bool:
        """Whether the cache skips this call of a transformer, counted from a run's first; for `predictable` ones."""
        if self.cache is None:
            return False
        from diffusers import TaylorSeerCacheConfig as Defaults

        option = lambda name: self.cache.get(name, getattr(Defaults, name))
        first, last = option("disable_cache_before_step"), option("disable_cache_after_step")
        computed = call < first or (call - first - 1) % option("cache_interval") == 0
        return not computed and (last is None or call < last)
