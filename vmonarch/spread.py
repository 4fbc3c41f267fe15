"""How the tokens of transformers beyond the Wan family are spread over ranks, for diffusers' `enable_parallelism`.

diffusers has plans for few of these models. Ours split the video's tokens, leave all others (text, images, sound) whole
on every rank, and gather the video at the end. Attention to text then needs no other rank, whatever its masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

Plan = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """How the tokens of a model are spread over ranks.

    Args:
        cp_plan: diffusers' plan, of a model's config: what is split and gathered; None for the one that its class
            has already.
        others_whole: whether every rank has all tokens beside the video's in its sequence. Otherwise ranks have parts
            of the whole sequence, one after the other.
        across: names in a block of other attention modules whose keys are the video's: the model's own attention
            serves them, with all ranks.
        leading: the name of an argument of the blocks, how many of the video's first tokens are a condition.
        differentiable: whether the gradients of one process are the sums of the ranks'. They are not where all ranks
            compute an output from whole tokens.
    """

    cp_plan: Callable[[Any], Plan] | None
    others_whole: bool = False
    across: tuple[str, ...] = ()
    leading: str | None = None
    differentiable: bool = True


def _input(dim: int, dims: int | None = None) -> ContextParallelInput:
    return ContextParallelInput(dim, expected_dims=dims)


def _outputs(dim: int, count: int = 1) -> dict[int, ContextParallelInput]:
    """Splits the first outputs of a module."""
    return dict.fromkeys(range(count), ContextParallelInput(dim, split_output=True))


_GATHERED = ContextParallelOutput(1)


def _at_embedding(config: Any) -> Plan:
    return {"x_embedder": _outputs(1), "rope": _outputs(0, 2), "proj_out": _GATHERED}


def _at_first_block(config: Any) -> Plan:
    return {
        "transformer_blocks.0": {"hidden_states": _input(1)},
        "transformer_blocks.*": {"image_rotary_emb": [_input(0), _input(0)]},
        "proj_out": _GATHERED,
    }


def _mochi(config: Any) -> Plan:
    return {"transformer_blocks.0": {"hidden_states": _input(1)}, "rope": _outputs(0, 2), "proj_out": _GATHERED}


def _cosmos(config: Any) -> Plan:
    # A condition gives every token a noise level of its own.
    levels = {"embedded_timestep": _input(1, 3), "temb": _input(1, 3)}
    of_blocks = {"extra_pos_emb": _input(1), "controlnet_residual": _input(1), **levels}
    return {
        "transformer_blocks.0": {"hidden_states": _input(1)},
        "transformer_blocks.*": of_blocks,
        "rope": _outputs(0, 2),
        "norm_out": levels,
        "proj_out": _GATHERED,
    }


# With conditions every token has a noise level of its own.
_LTX_INPUTS = {"hidden_states": _input(1), "timestep": _input(1, 2)}


def _ltx(config: Any) -> Plan:
    return {"": _LTX_INPUTS, "rope": _outputs(1, 2), "proj_out": _GATHERED}


def _ltx2(config: Any) -> Plan:
    rotary = _outputs(2 if config.rope_type == "split" else 1, 2)
    return {"": _LTX_INPUTS, "rope": rotary, "cross_attn_rope": rotary, "proj_out": _GATHERED}


def _kandinsky5(config: Any) -> Plan:
    blocks = "visual_transformer_blocks"
    return {
        f"{blocks}.0": {"visual_embed": _input(1)},
        f"{blocks}.*": {"rope": _input(1)},
        f"{blocks}.{config.num_visual_blocks - 1}": _GATHERED,
    }


HUNYUAN_VIDEO = Spread(_at_embedding, others_whole=True, leading="num_tokens")
HUNYUAN_VIDEO_15 = Spread(_at_embedding, others_whole=True)
COGVIDEOX = Spread(_at_first_block, others_whole=True)
MOCHI = Spread(_mochi, others_whole=True)
LTX = Spread(_ltx)
LTX2 = Spread(_ltx2, across=("video_to_audio_attn",), differentiable=False)
KANDINSKY5 = Spread(_kandinsky5, differentiable=False)
COSMOS = Spread(_cosmos)
MINIMAX_H3 = Spread(None)
