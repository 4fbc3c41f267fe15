"""Tiny random transformers of the families beyond Wan, built in code: no download, under a second each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro

GRID = (3, 4, 6)
# Tokens of text, and of the second and shorter prompt of a batch.
TEXT, SHORT = 7, 4

Inputs = dict[str, Any]
noise = torch.randn


def padding(text: int = TEXT) -> torch.Tensor:
    mask = torch.ones(2, text)
    mask[1, SHORT:] = 0
    return mask


@dataclass(frozen=True)
class Tiny:
    """A transformer of a family.

    Args:
        model: class in diffusers.
        config: of the model, beside COMMON.
        inputs: of its forward, for a grid.
        modules: how many self-attention modules of the video it has.
        before: tokens of other kinds before the video in its joint attention.
        after: after it.
    """

    model: str
    config: Inputs
    inputs: Callable[..., Inputs]
    modules: int = 2
    before: int = 0
    after: int = 0

    def make(self, seed: int = 0, **config: Any) -> Any:
        made = getattr(diffusers, self.model)
        common = COMMON.keys() & inspect.signature(made.__init__).parameters
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = made(**{name: COMMON[name] for name in common} | self.config | config).eval()
            for name, parameter in model.named_parameters():
                # Attention far from uniform, and modulations that let it through.
                if any(part in name for part in ("norm_q", "norm_k", "query_norm", "key_norm")) and parameter.ndim == 1:
                    torch.nn.init.normal_(parameter, 1.5, 0.5)
                if "odulation" in name or "adaln" in name.lower():
                    torch.nn.init.normal_(parameter, 0.0, 0.3)
                if "history_key_scale" in name:
                    # The history does not take all of the attention.
                    torch.nn.init.constant_(parameter, -5.0)
        return model

    def call(self, grid: tuple[int, int, int] = GRID, seed: int = 1) -> Inputs:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.inputs(*grid) | {"return_dict": False}


def first(out: Any) -> torch.Tensor:
    while isinstance(out, (tuple, list)):
        out = out[0]
    return out


def plain(T: int, H: int, W: int, batch: int = 2, **others: Any) -> Inputs:
    """What most models are called with, and others in its place or beside it."""
    shared = {
        "hidden_states": noise(batch, 4, T, 2 * H, 2 * W),
        "timestep": torch.full((batch,), 10),
        "encoder_hidden_states": noise(batch, TEXT, 16),
    }
    return shared | others


def masked(T: int, H: int, W: int, **others: Any) -> Inputs:
    """With a mask of the text."""
    return plain(T, H, W, encoder_attention_mask=padding(), **others)


def hunyuan(T: int, H: int, W: int) -> Inputs:
    return masked(T, H, W, pooled_projections=noise(2, 8), guidance=torch.tensor([6.0, 6.0]))


def framepack(T: int, H: int, W: int) -> Inputs:
    history = {"latents_clean": 2, "latents_history_2x": 2, "latents_history_4x": 4}
    return {
        **{name: value[:1] for name, value in hunyuan(T, H, W).items()},
        "image_embeds": noise(1, 5, 16),
        "indices_latents": torch.arange(3, 3 + T),
        **{name: noise(1, 4, frames, 2 * H, 2 * W) for name, frames in history.items()},
        **{f"indices_{name}": torch.arange(frames) for name, frames in history.items()},
    }


def hunyuan15(T: int, H: int, W: int) -> Inputs:
    second = {"encoder_hidden_states_2": noise(2, 5, 8), "encoder_attention_mask_2": padding(5)}
    video = {"hidden_states": noise(2, 9, T, H, W), "timestep": torch.tensor([10.0, 10.0])}
    return masked(T, H, W, **video, **second, image_embeds=torch.zeros(2, 4, 12))


def ltx(T: int, H: int, W: int) -> Inputs:
    return masked(T, H, W, hidden_states=noise(2, T * H * W, 4), num_frames=T, height=H, width=W)


def ltx2(T: int, H: int, W: int) -> Inputs:
    return ltx(T, H, W) | {
        "audio_hidden_states": noise(2, 9, 4),
        "audio_encoder_hidden_states": noise(2, TEXT, 16),
        "timestep": torch.rand(2) * 1000,
        "audio_num_frames": 9,
        "fps": 25.0,
    }


def kandinsky(T: int, H: int, W: int, **others: Any) -> Inputs:
    video = {"hidden_states": noise(1, T, 2 * H, 2 * W, 4), "timestep": torch.tensor([10.0])}
    return plain(T, H, W, 1, **video, pooled_projections=noise(1, 8), **others)


def kandinsky5(T: int, H: int, W: int) -> Inputs:
    places = tuple(torch.arange(size) for size in (T, H, W))
    return kandinsky(T, H, W, visual_rope_pos=places, text_rope_pos=torch.arange(TEXT))


def kandinsky6(T: int, H: int, W: int) -> Inputs:
    return kandinsky(T, H, W, audio_hidden_states=noise(1, 9, 4))


def motif(T: int, H: int, W: int) -> Inputs:
    return masked(T, H, W, image_embeds=noise(2, 5, 8))


def cosmos(T: int, H: int, W: int) -> Inputs:
    return plain(T, H, W, 1, attention_mask=torch.ones(1, TEXT).bool(), fps=30)


def cosmos3(T: int, H: int, W: int) -> Inputs:
    tokens = T * H * W
    video = torch.arange(TEXT, TEXT + tokens)
    return {
        "input_ids": torch.arange(TEXT),
        "text_indexes": torch.arange(TEXT),
        "position_ids": torch.arange(TEXT + tokens)[None].expand(3, -1),
        "und_len": TEXT,
        "sequence_length": TEXT + tokens,
        "vision_tokens": [noise(1, 2, T, H, W)],
        "vision_token_shapes": [(T, H, W)],
        "vision_sequence_indexes": video,
        "vision_mse_loss_indexes": video,
        "vision_timesteps": torch.full((tokens,), 0.5),
        "vision_noisy_frame_indexes": [torch.arange(T)],
    }


def cogvideox(T: int, H: int, W: int) -> Inputs:
    tokens = {"hidden_states": noise(2, T, 4, 2 * H, 2 * W), "encoder_hidden_states": noise(2, TEXT, 8)}
    return plain(T, H, W, **tokens, image_rotary_emb=get_3d_rotary_pos_embed(16, ((0, 0), (H, W)), (H, W), T))


def allegro(T: int, H: int, W: int) -> Inputs:
    *angles, t, h, w = get_3d_rotary_pos_embed_allegro(
        embed_dim=12,
        crops_coords=((0, 0), (H, W)),
        grid_size=(H, W),
        temporal_size=T,
        interpolation_scale=(1.0, 1.0, 1.0),
        device="cpu",
    )
    places = torch.cartesian_prod(t.long(), h.long(), w.long()).T.reshape(3, 1, -1)
    text = {"encoder_hidden_states": noise(1, TEXT, 8), "encoder_attention_mask": torch.ones(1, TEXT)}
    return plain(T, H, W, 1, **text, image_rotary_emb=(tuple(angles), tuple(places)))


def helios(T: int, H: int, W: int) -> Inputs:
    frames = {"short": 2, "mid": 2, "long": 4}
    latents = {f"latents_history_{age}": noise(1, 4, n, 2 * H, 2 * W) for age, n in frames.items()}
    places = {f"indices_latents_history_{age}": torch.arange(n)[None].float() for age, n in frames.items()}
    return plain(T, H, W, 1, **latents, **places, indices_hidden_states=torch.arange(T)[None].float())


def anyflow(T: int, H: int, W: int) -> Inputs:
    times = {"timestep": torch.full((1, T), 500.0), "r_timestep": torch.full((1, T), 250.0)}
    return plain(T, H, W, 1, hidden_states=noise(1, T, 4, 2 * H, 2 * W), **times)


def raster(T: int, H: int, W: int) -> torch.Tensor:
    """Frame, row and column of every token [S, 3], of a step of their own each."""
    return torch.cartesian_prod(torch.arange(T) / 3, torch.arange(H) / 5, torch.arange(W) / 7)


def minimax_h3(T: int, H: int, W: int) -> Inputs:
    video, audio = T * H * W, 9
    tokens = TEXT + audio + video
    text_at, audio_at, video_at = torch.arange(tokens).split([TEXT, audio, video])
    tags = torch.zeros(tokens, dtype=torch.long)
    tags[text_at], tags[audio_at] = 1, 2
    return {
        "hidden_states": noise(1, video, 16),
        "audio_hidden_states": noise(1, audio, 6),
        "encoder_hidden_states": noise(1, TEXT, 8),
        "timestep": torch.tensor([0.7, 0.3]),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": torch.cat([torch.rand(TEXT + audio, 3), raster(T, H, W)]),
        "video_indices": video_at,
        "audio_indices": audio_at,
        "text_indices": text_at,
    }


# What models are told of these, unless a family says otherwise.
COMMON: Inputs = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
    "text_dim": 16,
    "text_embed_dim": 16,
    "rope_axes_dim": (4, 4, 4),
}
HUNYUAN: Inputs = {
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "patch_size": 2,
    "patch_size_t": 1,
    "guidance_embeds": True,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 4, 4),
}
LTX: Inputs = {"attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 16}
KANDINSKY: Inputs = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 16,
    "in_text_dim2": 8,
    "time_dim": 16,
    "patch_size": (1, 2, 2),
    "model_dim": 32,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 6, 6),
}
SAMPLE: Inputs = {"sample_width": 12, "sample_height": 8}
COGVIDEOX: Inputs = {
    **SAMPLE,
    "sample_frames": 9,
    "attention_head_dim": 16,
    "time_embed_dim": 2,
    "text_embed_dim": 8,
    "patch_size": 2,
    "max_text_seq_length": TEXT,
    "use_rotary_positional_embeddings": True,
}
# Of the history of Framepack and of Helios at GRID, patches of (1, 2, 2), (2, 4, 4) and (4, 8, 8) latents.
HISTORY = 2 * 24 + 6 + 2

FAMILIES = {
    "hunyuan": Tiny("HunyuanVideoTransformer3DModel", HUNYUAN, hunyuan, after=TEXT),
    # Image to video: the first frame has a noise level of its own.
    "hunyuan-i2v": Tiny(
        "HunyuanVideoTransformer3DModel",
        HUNYUAN | {"image_condition_type": "token_replace"},
        hunyuan,
        after=TEXT,
    ),
    "framepack": Tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        HUNYUAN | {"has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True},
        framepack,
        before=HISTORY,
        after=5 + TEXT,
    ),
    "hunyuan15": Tiny(
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 9,
            "mlp_ratio": 2.0,
            "patch_size": 1,
            "patch_size_t": 1,
            "text_embed_2_dim": 8,
            "image_embed_dim": 12,
            "target_size": 16,
            "task_type": "t2v",
        },
        hunyuan15,
        after=4 + 5 + TEXT,
    ),
    "ltx": Tiny("LTXVideoTransformer3DModel", LTX, ltx),
    "ltx2": Tiny(
        "LTX2VideoTransformer3DModel",
        {
            **LTX,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 8,
            "rope_double_precision": False,
        },
        ltx2,
    ),
    "kandinsky5": Tiny("Kandinsky5Transformer3DModel", KANDINSKY, kandinsky5),
    "kandinsky6": Tiny(
        "Kandinsky6Transformer3DModel",
        KANDINSKY | {"in_audio_dim": 4, "out_audio_dim": 4, "visual_cond": False},
        kandinsky6,
    ),
    "motif": Tiny(
        "MotifVideoTransformer3DModel",
        {
            "num_layers": 1,
            "num_single_layers": 2,
            "num_decoder_layers": 1,
            "image_embed_dim": 8,
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
        motif,
        modules=3,
        after=5 + TEXT,
    ),
    "cosmos": Tiny(
        "CosmosTransformer3DModel",
        {
            "mlp_ratio": 2,
            "adaln_lora_dim": 4,
            "max_size": (8, 32, 32),
            "patch_size": (1, 2, 2),
            "concat_padding_mask": False,
            "extra_pos_embed_type": "learnable",
        },
        cosmos,
    ),
    "cosmos3": Tiny(
        "Cosmos3OmniTransformer",
        {
            "head_dim": 12,
            "hidden_size": 24,
            "intermediate_size": 24,
            "latent_channel": 2,
            "latent_patch_size": 1,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "patch_latent_dim": 2,
            "rope_axes_dim": [2, 2, 2],
            "vocab_size": 32,
        },
        cosmos3,
        before=TEXT,
    ),
    "cogvideox": Tiny("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox, before=TEXT),
    # Without a face.
    "consisid": Tiny("ConsisIDTransformer3DModel", COGVIDEOX, cogvideox, before=TEXT),
    "mochi": Tiny(
        "MochiTransformer3DModel",
        {
            "patch_size": 2,
            "attention_head_dim": 8,
            "pooled_projection_dim": 16,
            "time_embed_dim": 4,
            "max_sequence_length": TEXT,
        },
        masked,
        after=TEXT,
    ),
    "easyanimate": Tiny(
        "EasyAnimateTransformer3DModel",
        {"attention_head_dim": 16, "patch_size": 2, "mmdit_layers": 1, "time_embed_dim": 2},
        plain,
        before=TEXT,
    ),
    "allegro": Tiny(
        "AllegroTransformer3DModel",
        {**SAMPLE, "sample_frames": 3, "cross_attention_dim": 24, "caption_channels": 8},
        allegro,
    ),
    "helios": Tiny(
        "HeliosTransformer3DModel",
        {"patch_size": (1, 2, 2), "freq_dim": 256, "rope_dim": (4, 4, 4), "is_amplify_history": True},
        helios,
        before=HISTORY,
    ),
    "anyflow": Tiny("AnyFlowTransformer3DModel", {"patch_size": (1, 2, 2), "rope_max_seq_len": 32}, anyflow),
    "minimax-h3": Tiny(
        "MiniMaxH3Transformer3DModel",
        {
            "attention_head_dim": 16,
            "hidden_size": 24,
            "audio_in_channels": 6,
            "text_dim": 8,
            "freq_dim": 8,
            "time_embed_hidden_dim": 24,
            "time_embed_dim": 16,
            "rope_freq_dim": 2,
        },
        minimax_h3,
        before=TEXT + 9,
    ),
}
