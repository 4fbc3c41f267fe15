"""A small stand-in of what ComfyUI has around attention: models, the seam, patchers, and runs of a sampler.

A model here computes nothing but attention: of queries, keys and values that block, noise level and prompt decide.
"""

import contextlib
import copy
import math
import zlib
from types import SimpleNamespace

import torch

from vmonarch.grid import LatentGrid

HEADS, DIM = 2, 8
GRID = LatentGrid(3, 2, 4)
PROMPT = 5
KEY = "optimized_attention_override"
CALLBACKS = SimpleNamespace(ON_PRE_RUN="on_pre_run", ON_CLEANUP="on_cleanup")
WRAPPERS = SimpleNamespace(DIFFUSION_MODEL="diffusion_model")


def by_heads(x, apart=False):
    """[B, S, H·D] or [B, H, S, D] -> [B, S, H, D]."""
    return x.transpose(1, 2) if apart else x.unflatten(2, (HEADS, -1))


def exact(q, k, v, mask=None, scale=None):
    """[B, S, H, D] -> [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def attention(
    q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, scale=None, **_
):
    """The function under the seam."""
    out = exact(*(by_heads(x, skip_reshape) for x in (q, k, v)), mask, scale)
    return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)


def at_the_seam(*args, transformer_options, **named):
    override = transformer_options.get(KEY)
    named["transformer_options"] = transformer_options
    return attention(*args, **named) if override is None else override(attention, *args, **named)


def tokens(block, sigma, prompt, name, count):
    """What a block has as queries, keys or values [1, S, H·D]."""
    seed = zlib.crc32(repr((block, round(1000 * sigma), prompt, name, count)).encode())
    return 2 * torch.randn(1, count, HEADS * DIM, generator=torch.Generator().manual_seed(seed))


class Executor:
    """A call of a model, with wrappers around it."""

    def __init__(self, original, class_obj, wrappers):
        self.original, self.class_obj, self.wrappers = original, class_obj, wrappers

    def __call__(self, *args, **kwargs):
        if not self.wrappers:
            return self.original(*args, **kwargs)
        return self.wrappers[0](Executor(self.original, self.class_obj, self.wrappers[1:]), *args, **kwargs)


class Model:
    """Every block: self-attention of the video, then cross-attention.

    Args:
        apart: whether heads are apart at the seam.
        beside: numbers of tokens before and after the video's.
        twice: blocks that attend twice, as VACE's do.
        named: what self-attention is called with besides.
        others: in place of what the class has.
    """

    patch_size = (1, 2, 2)
    # By list of blocks, the type that is told of them.
    lists = {"blocks": "double"}
    tells_grid = tells_block = True

    def __init__(self, blocks=2, apart=False, beside=(0, 0), twice=(), named=None, **others):
        vars(self).update(others)
        for name in self.lists:
            setattr(self, name, [None] * blocks)
        self.apart, self.beside, self.twice, self.named = apart, beside, twice, named or {}
        self.ref_conv = object() if beside[0] else None

    def __call__(self, x, timestep, context, transformer_options, **kwargs):
        """The outputs of self-attention [B, S, H, D], by block."""
        wrappers = transformer_options.get("wrappers", {}).get(WRAPPERS.DIFFUSION_MODEL, {})
        flat = [wrapper for several in wrappers.values() for wrapper in several]
        return Executor(self._forward, self, flat)(x, timestep, context, None, None, transformer_options, **kwargs)

    def _forward(self, x, timestep, context, clip_fea=None, time_dim_concat=None, transformer_options=None, **kwargs):
        options, sigma, outputs = transformer_options, float(timestep[0]), []
        if self.tells_grid:
            options["grid_sizes"] = x.shape[2], x.shape[3] // 2, x.shape[4] // 2
        count = math.prod(n // p for n, p in zip(x.shape[2:], self.patch_size, strict=True)) + sum(self.beside)
        for name, kind in self.lists.items():
            for index in range(len(getattr(self, name))):
                if self.tells_block:
                    options |= {"block_index": index, "block_type": kind}
                for time in range(2 if index in self.twice else 1):
                    outputs.append(self._attend(options, (name, index, time), sigma, count, count))
                self._attend(options, (name, index, "cross"), sigma, count, context.shape[1])
        return outputs

    def _attend(self, options, block, sigma, queries, keys):
        counts = {"q": queries, "k": keys, "v": keys}
        q, k, v = (self.tokens(block, sigma, options["uuids"], name, count) for name, count in counts.items())
        named = self.named if queries == keys else {}
        if self.apart:
            q, k, v = (by_heads(x).transpose(1, 2) for x in (q, k, v))
            named = named | {"skip_reshape": True, "skip_output_reshape": True}
        out = at_the_seam(q, k, v, HEADS, transformer_options=options, **named)
        return by_heads(out, self.apart)

    @staticmethod
    def tokens(block, sigma, prompts, name, count):
        return torch.cat([tokens(block, sigma, prompt, name, count) for prompt in prompts])


class WanModel(Model):
    pass


class HunyuanVideo(Model):
    lists = {"double_blocks": "double", "single_blocks": "single"}
    tells_grid = False


class LTXVModel(Model):
    lists = {"transformer_blocks": ""}
    patch_size = (1, 1, 1)
    tells_grid = tells_block = False


class Sampling:
    def percent_to_sigma(self, percent):
        return 1 - percent


class Patcher:
    def __init__(self, model):
        self.objects = {"diffusion_model": model, "model_sampling": Sampling()}
        self.model_options = {"transformer_options": {}}
        self.wrappers, self.callbacks, self.attachments = {}, {}, {}

    def clone(self):
        twin = copy.copy(self)
        twin.model_options = {"transformer_options": dict(self.model_options["transformer_options"])}
        for name in ("wrappers", "callbacks"):
            of = {key: {k: list(v) for k, v in entries.items()} for key, entries in getattr(self, name).items()}
            setattr(twin, name, of)
        twin.attachments = dict(self.attachments)
        return twin

    def get_model_object(self, name):
        return self.objects[name]

    def add_wrapper_with_key(self, kind, key, wrapper):
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind, key):
        self.wrappers.get(kind, {}).pop(key, None)

    def add_callback_with_key(self, kind, key, callback):
        self.callbacks.setdefault(kind, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, kind, key):
        self.callbacks.get(kind, {}).pop(key, None)

    def set_attachments(self, key, attachment):
        self.attachments[key] = attachment

    def get_attachment(self, key):
        return self.attachments.get(key)

    def call_back(self, kind):
        for callbacks in self.callbacks.get(kind, {}).values():
            for callback in callbacks:
                callback(self)


@contextlib.contextmanager
def sampling(patcher, schedule, **told):
    """A run of a sampler: a function that calls the model once, at a noise level, of prompts."""

    def ask(sigma, prompts=("cond", "uncond"), grid=GRID, **kwargs):
        patch = patcher.objects["diffusion_model"].patch_size
        sizes = kwargs.pop("latents", [tokens * of for tokens, of in zip(grid, patch, strict=True)])
        x = torch.zeros(len(prompts), 16, *sizes)
        options = {**patcher.model_options["transformer_options"], "wrappers": patcher.wrappers}
        options |= {"sigmas": torch.tensor([sigma]), "sample_sigmas": torch.tensor(schedule), "uuids": list(prompts)}
        options = {name: value for name, value in (options | told).items() if value is not None}
        given = {"reference_latent": kwargs.pop("reference")} if "reference" in kwargs else {}
        context = torch.zeros(len(prompts), kwargs.pop("prompt", PROMPT), 4)
        outputs = patcher.objects["diffusion_model"](x, torch.tensor([sigma]), context, options, **given, **kwargs)
        assert options.get(KEY) is patcher.model_options["transformer_options"].get(KEY), "the override was left behind"
        return outputs

    patcher.call_back(CALLBACKS.ON_PRE_RUN)
    try:
        yield ask
    finally:
        patcher.call_back(CALLBACKS.ON_CLEANUP)
