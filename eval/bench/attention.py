"""The parts that benchmarks of attention share: random inputs, and a way that is checked on a few heads.

Shapes: tensors are [B, S, H, D]; B batch, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vmonarch.engines import FA3, fa3_backend
from vmonarch.eval.bench.runner import NAMES, Case, Way
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference

PASSES = {False: "forward", True: "forward+backward"}
# Settings of the benchmarks of attention.
ATTENTION = {
    "layout": "[B, S, H, D]; SDPA gets transposed views of it",
    "inputs": "standard normal",
    "reference": "float32 plain torch, all rows of the first and the last head; gradients of the first head",
}


def case_of(label: str, training: bool = False, **sizes: Any) -> Case:
    """A case of these sizes; `training` is forward and backward together, and the end of its label."""
    return Case(label=f"{label} {PASSES[training]}", training=training, **sizes)


def randn(
    seed: int, device: torch.device, dtype: torch.dtype, *sizes: Sequence[int], learn: bool = False
) -> list[torch.Tensor]:
    """Standard normal tensors of these sizes, the same on every run; with `learn` they have gradients."""
    generator = torch.Generator(device).manual_seed(seed)
    made = (torch.randn(*size, generator=generator, device=device) for size in sizes)
    return [x.to(dtype).requires_grad_(learn) for x in made]


def exact(*tensors: torch.Tensor) -> torch.Tensor:
    """Exact attention in plain torch, with every score computed: that with a bias of rank 0."""
    scale, none = tensors[0].shape[-1] ** -0.5, [x.new_empty(1, x.shape[1], 1, 0) for x in tensors[:2]]
    return flash_bias_attention_reference(*tensors, *none, scale=scale, causal=False, key_mask=None)[0]


def attention_way(
    attend: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor | None,
    **work: Any,
) -> Way:
    """`attend` of the tensors, compared with `reference` of float32 copies of some of their heads, all rows.

    These are the first and the last head, in training the first.

    Args:
        grad: gradient of the output; None if nothing is trained.
        work: of the way.
    """
    checked = [0] if grad is not None else sorted({0, tensors[0].shape[2] - 1})

    def expected() -> dict[str, torch.Tensor]:
        copies = [x[:, :, checked].detach().float().requires_grad_(grad is not None) for x in tensors]
        of_output = None if grad is None else grad[:, :, checked].float()
        return dict(zip(NAMES, with_gradients(lambda: reference(*copies), copies, of_output)(), strict=False))

    return Way(
        run=with_gradients(lambda: attend(*tensors), tensors, grad),
        found=lambda results: {name: x[:, :, checked] for name, x in zip(NAMES, results, strict=False)},
        expected=expected,
        input_bytes=sum(x.nbytes for x in (*tensors, grad) if x is not None),
        **work,
    )


def with_gradients(
    attend: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor], grad_out: torch.Tensor | None
) -> Callable[[], Sequence[torch.Tensor]]:
    """The call that gives (out,), or with `grad_out` (out, gradients of the leaves)."""

    def run() -> Sequence[torch.Tensor]:
        if grad_out is None:
            with torch.no_grad():
                return (attend(),)
        out = attend()
        return (out.detach(), *torch.autograd.grad(out, leaves, grad_out))

    return run


def sdpa(backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by torch, on transposed views as diffusers has them, or by FlashAttention-3.

    Args:
        backend: "cudnn" or "fa2"; "fa3", FlashAttention-3 without gradients; or "sdpa", the one that torch chooses.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == FA3:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(query, key, value, backend=fa3_backend(query.device))
    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "fa2": [SDPBackend.FLASH_ATTENTION]}
    with sdpa_kernel(backends[backend]) if backend in backends else contextlib.nullcontext():
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
