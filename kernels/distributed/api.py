"""Front door of frame-parallel attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from vmonarch.grid import LatentGrid
from vmonarch.kernels.common.checks import check_qkv
from vmonarch.kernels.common.launch import learns, use_triton
from vmonarch.kernels.distributed.exchange import Link, agree, refuse, split_evenly
from vmonarch.kernels.distributed.frame_parallel import run
from vmonarch.kernels.distributed.stages import Call, Stages, TorchStages
from vmonarch.options import VMonarchOptions, takes_options
from vmonarch.precision import own_precision
from vmonarch.validation import check_flag, check_implementation, resolve_scale


@torch.compiler.disable
@takes_options
@own_precision
def frame_parallel_vmonarch_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: LatentGrid | tuple[int, int, int],
    group: dist.ProcessGroup | None = None,
    options: VMonarchOptions | None = None,
    scale: float | None = None,
    entropy_grad: bool = False,
    return_lse: bool = False,
    implementation: str = "auto",
    **named: Any,
) -> Any:
    """`vmonarch_attention` of a video whose latent frames are distributed over the ranks of a process group.

    Rank r has T_r ≥ 1 frames, those after the frames of rank r - 1; ranks may have different numbers, which stay the
    same for calls with the same arguments. The result is that of `vmonarch_attention` with frames_per_block=1 on the
    whole video, up to rounding. So are the gradients, for which all ranks must run the backward pass. Plain torch
    exchanges intermediates of 16-bit tensors in float32; the kernels in the dtype of the tensors.

    All ranks must make the same calls in the same order, with the same arguments. The first call with new arguments
    compares them on all ranks, which waits for the device; later ones do not, so that a rank that then departs from
    the others makes them wait until the timeout of the group. It is not traced by torch.compile, which breaks the
    graph here.

    Args:
        query: [B, T_r·H·W, H, D], the tokens of this rank's frames.
        key: [B, T_r·H·W, H, D].
        value: [B, T_r·H·W, H, Dv].
        grid: (T, H, W) of the whole video.
        group: the ranks, in the order of their frames; the default group if None.
        options: what is computed; None for the defaults, or for `named`. frames_per_block, tiles, row_share,
            r_share and last_l_update must be left at theirs. Exact frames are counted in the whole video.
        scale, entropy_grad, return_lse, implementation: as in `vmonarch_attention`.
        **named: the `VMonarchOptions` by name, in place of `options`.

    Returns:
        out [B, T_r·H·W, H, Dv] in the dtype of `query`; with `return_lse` also lse [B, H, T_r·H·W].

    Raises:
        TypeError, ValueError: an argument is not as described; or a rank calls with other arguments than the first, or
            has refused its own, and the message names the rank; or it has other frames than in a call before.
        NotImplementedError: implementation="triton", and the kernels cannot take these tensors; the message says why.
            Or forward-mode AD goes through the tensors.
        RuntimeError: torch.distributed is not initialised, or this process is not in the group.

    Source: docs/attention.md, "Frames on several devices".
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("frame_parallel_vmonarch_attention needs torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError("this process is not a member of the group that it calls with")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}")
    rank = dist.get_rank(group)
    try:
        check_qkv(query, key, value, same_length=True)
        grid = LatentGrid.parse(grid)
        options = VMonarchOptions.of(options, named)
        for name in options.not_by_frames:
            raise ValueError(f"{name} must be left alone: ranks share whole frames, and exact rows as they are")
        check_flag("entropy_grad", entropy_grad)
        check_implementation(implementation)
        check_flag("return_lse", return_lse)
        own_frames = _own_frames(query, grid)
        scale = resolve_scale(scale, query.shape[-1])
        key_frames = None if options.pattern is None else options.pattern.key_frames(grid.frames)
        op = "frame_parallel_vmonarch_attention"
        triton = use_triton(op, implementation, query, key, value, family="monarch")
    except Exception as error:
        refuse(group, query.device if isinstance(query, torch.Tensor) else torch.device("cpu"), error)
        raise
    requires_grad = learns(query, key, value)
    B, _, heads, head_dim = query.shape
    frames = agree(
        group,
        query.device,
        {
            "grid": tuple(grid),
            "the batch size": B,
            "the number of heads": heads,
            "the head dimension": head_dim,
            "the head dimension of value": value.shape[3],
            "the dtype": str(query.dtype),
            "the device": query.device.type,
            **vars(options),
            "exact": options.pattern,
            "scale": scale,
            "entropy_grad": entropy_grad,
            "the implementation": "triton" if triton else "torch",
            "whether gradients are required": requires_grad,
        },
        "the frames of a rank",
        own_frames,
    )
    if sum(frames) != grid.frames:
        raise ValueError(f"the ranks must have the {grid.frames} frames of grid {tuple(grid)}; they have {frames}")
    call = Call(
        grid=grid,
        frames=tuple(frames),
        positions=split_evenly(grid.tokens_per_frame, len(frames)),
        rank=rank,
        options=options,
        key_frames=key_frames if key_frames is not None and any(key_frames) else None,
        scale=scale,
        entropy_grad=entropy_grad,
    )
    link = Link(group, query.device, requires_grad)
    if triton:
        from vmonarch.kernels.distributed.triton_stages import TritonStages

        if scale < 0:
            # The kernels take the maximum of raw scores, which only a scale that is not negative keeps in order.
            query, call = -query, dataclasses.replace(call, scale=-scale)
        stages: Stages = TritonStages(key, value, call)
    else:
        stages = TorchStages(key, value, call)
    # Triton launches on the current device, wherever the tensors are.
    with torch.cuda.device_of(query):
        out, lse = run(query, key, value, call, link, stages)
    return (out, lse) if return_lse else out


def _own_frames(query: torch.Tensor, grid: LatentGrid) -> int:
    tokens = grid.tokens_per_frame
    if query.shape[1] % tokens:
        raise ValueError(
            f"query has {query.shape[1]} tokens, which are no whole frames of {tokens} (grid {tuple(grid)});"
            " every rank must have whole frames"
        )
    return query.shape[1] // tokens
