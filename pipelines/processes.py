"""The processes that a launcher such as `torchrun` started, and one video spread over all of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from vmonarch.configs import InputError
from vmonarch.installation import find_transformers

if TYPE_CHECKING:
    from vmonarch.pipelines.config import SamplingConfig
    from vmonarch.pipelines.loading import LoadedModel


class Shard(NamedTuple):
    """This process among those that share the work."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def of_environment(cls) -> Shard:
        """Read RANK, WORLD_SIZE and LOCAL_RANK, which launchers set; without them this is the only process.

        Raises:
            InputError: they are no numbers, or contradict each other.
        """
        values = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
        values.append(os.environ.get("LOCAL_RANK", values[0]))
        if not all(value.isdecimal() for value in values) or int(values[0]) >= int(values[1]):
            raise InputError("RANK", f"must be a number below WORLD_SIZE, got RANK={values[0]}, WORLD_SIZE={values[1]}")
        return cls(*map(int, values))


ALONE = Shard()


def check_alone() -> None:
    """Check that this is the only process, for commands that would do everything once in each.

    Raises:
        InputError: it is not.
    """
    size = Shard.of_environment().size
    if size > 1:
        several = "`vmonarch generate` shares every video and `vmonarch eval` its items"
        raise InputError("WORLD_SIZE", f"is {size}, but this command is for one process; with several, {several}")


def check_sharing(config: SamplingConfig, shard: Shard) -> None:
    """Check that several processes can compute the videos of a config together, before anything is loaded.

    Raises:
        InputError: `device` or `offload` does not fit.
    """
    if shard.size == 1:
        return
    who = f"{shard.size} processes that share a video"
    if torch.accelerator.device_count() == 0:
        raise InputError("device", f"cannot be the CPU for {who}: each needs a GPU")
    for name, needed, why in (("device", "auto", ", as each has its own"), ("offload", "none", "")):
        if getattr(config, name) != needed:
            raise InputError(name, f"must be {needed} for {who}{why}, got {getattr(config, name)}")


@contextlib.contextmanager
def shared_videos(model: LoadedModel, config: SamplingConfig, shard: Shard) -> Iterator[None]:
    """Spread the tokens of every video over all processes while the block runs (diffusers' context parallelism).

    All processes must sample the same videos; afterwards the pipeline serves no more.

    Args:
        config: completed and checked (`check_sharing`).

    Raises:
        InputError: a transformer cannot be spread.
    """
    if shard.size == 1:
        yield
        return
    from diffusers import ContextParallelConfig

    assert config.num_frames is not None and config.height is not None and config.width is not None
    tokens = model.folder.grid(config.num_frames, config.height, config.width).tokens
    on_gpu = model.device.type == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=model.device if on_gpu else None)
    transformer: Any
    for transformer in find_transformers(model.pipe).values():
        uneven = any(count % shard.size for count in (tokens, transformer.config.num_attention_heads))
        parallel = ContextParallelConfig(ulysses_degree=shard.size, ulysses_anything=uneven)
        try:
            transformer.enable_parallelism(config=parallel)
        except (ValueError, NotImplementedError) as error:
            raise InputError("model", f"cannot be spread over {shard.size} processes: {error}") from error
    yield
    # Not after an error: NCCL would wait for the other processes, which may be in the middle of an exchange.
    dist.destroy_process_group()
