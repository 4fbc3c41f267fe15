"""The parts that all benchmarks of attention share: random inputs, and a way that is checked on a few heads.

Shapes: tensors are [B, S, H, D]; B batch, S tokens, H heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vmonarch.engines import FA3, fa3_backend
from vmonarch.eval.bench.runner import NAMES, Case, Way
from vmonarch.kernels.flash_bias.reference import flash_bias_attention_reference

PASSES = {False: "forward", True: "forward+backward"}
BOTH = (False, True)
# Settings of the benchmarks of attention.
ATTENTION = {
    "layout": "[B, S, H, D]; SDPA and FlexAttention get transposed views of it",
    "inputs": "standard normal",
    "reference": "float32 plain torch, all rows of the first and the last head; gradients of the first head, or of all"
    " where they share factors",
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


def exact(*tensors: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """Exact attention in plain torch, with every score computed: that with a bias of rank 0."""
    scale, none = tensors[0].shape[-1] ** -0.5, [x.new_empty(1, x.shape[1], 1, 0) for x in tensors[:2]]
    return flash_bias_attention_reference(*tensors, *none, scale=scale, causal=causal, key_mask=None)[0]


def attention_way(
    attend: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    grad: torch.Tensor | None,
    *,
    leaves: Sequence[torch.Tensor] | None = None,
    names: Sequence[str] = NAMES,
    **work: Any,
) -> Way:
    """`attend` of the tensors, compared with `reference` of float32 copies of some of their heads, all rows.

    These are the first and the last head, in training the first; or all, where heads share one of the tensors.

    Args:
        grad: gradient of the output, of which it may be a part; None if nothing is trained.
        leaves: what must exist before the call, and whose gradients are computed, of which those without a name are not
            compared; None for the tensors.
        work: of the way.
    """
    heads, leaves = tensors[0].shape[2], tensors if leaves is None else leaves
    checked = [0] if grad is not None else sorted({0, heads - 1})
    if any(x.shape[2] != heads for x in tensors):
        checked = list(range(heads))

    def of_checked(x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[2] == 1 else x[:, :, checked]

    def expected() -> dict[str, torch.Tensor]:
        copies = [of_checked(x).detach().float().requires_grad_(grad is not None) for x in tensors]
        of_output = None if grad is None else of_checked(grad).float()
        return dict(zip(names, with_gradients(lambda: reference(*copies), copies, of_output)(), strict=False))

    return Way(
        run=with_gradients(lambda: attend(*tensors), leaves, grad),
        found=lambda results: {name: of_checked(x) for name, x in zip(names, results, strict=False)},
        expected=expected,
        input_bytes=bytes_of([*leaves, grad]),
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


def sdpa(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool = False
) -> torch.Tensor:
    """Exact attention of [B, S, H, D] by torch, on transposed views as diffusers has them, or by FlashAttention-3.

    Args:
        backend: "cudnn" or "fa2"; "fa3", FlashAttention-3 without gradients; or "sdpa", the one that torch chooses.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if backend == FA3:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        return dispatch_attention_fn(query, key, value, is_causal=causal, backend=fa3_backend(query.device))
    backends = {"cudnn": [SDPBackend.CUDNN_ATTENTION], "fa2": [SDPBackend.FLASH_ATTENTION]}
    with sdpa_kernel(backends[backend]) if backend in backends else contextlib.nullcontext():
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)


def bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of all that are there."""
    return sum(x.nbytes for x in tensors if x is not None)
