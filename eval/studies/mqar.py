"""How much small models recall, by the state they keep: `python -m vmonarch.eval.studies.mqar --output mqar.json`.

Multi-query associative recall, as in Based, §3.1 and Fig. 2: pairs of a key and a value, then the keys again in another
order; at each the model must name the value. Two-layer models whose mixers are attention, windows, linear attention, or
a window and then linear attention (Based) train on short sequences and are tested on long ones with more pairs.

Shapes: B sequences, S tokens, K pairs, D width, V vocabulary.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from vmonarch.eval.record import script_parser, script_record
from vmonarch.files import write_json
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.window.api import window_attention

# Exponent of the law that places the queries, as in the paper's data: slot x is taken with weight x^(POWER - 1).
POWER = 0.01
# Of rotary positions; the bias is that of their queries and keys at first.
ROTARY_BASE, ROTARY_BIAS = 100.0, 2.0


@dataclass(frozen=True)
class Task:
    """Sizes of the task and of the training; half of the vocabulary are keys and half values."""

    vocabulary: int = 8192
    tokens: int = 256
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    test_tokens: int = 1024
    test_pairs: tuple[int, ...] = (4, 16, 64, 128, 256)
    steps: int = 600
    batch: int = 128
    rates: tuple[float, ...] = (2e-3, 5e-3, 1e-2)
    width: int = 128
    # Sequences of a test.
    tested: int = 256


@dataclass(frozen=True)
class Mixer:
    """One layer: attention, a window of `size` tokens, or linear attention with d' = `size`."""

    kind: str
    size: int = 0
    # Whether it knows how far apart tokens are.
    rotary: bool = False

    def state(self, width: int, tokens: int) -> int:
        """Numbers kept after some tokens (Based, Eq. 8, 10 and 11); all d'² products, as our kernels keep them."""
        if self.kind == "linear":
            return (1 + self.size + self.size**2) * (width + 1)
        return 2 * width * (tokens if self.kind == "attention" else min(tokens, self.size))

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Causal, of [B, S, 1, ·]."""
        if self.kind == "linear":
            return taylor_attention(q, k, v, causal=True)
        if self.kind == "window":
            return window_attention(q, k, v, window=self.size, causal=True)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _alone(kind: str, size: int = 0) -> tuple[Mixer, Mixer]:
    return Mixer(kind, size, rotary=kind != "linear"), Mixer(kind, size)


# A window of two holds the token before and no other: there is nothing that positions would tell.
MODELS = {
    "attention": _alone("attention"),
    **{f"window {n}": _alone("window", n) for n in (8, 32, 128, 512)},
    **{f"linear d'={n}": _alone("linear", n) for n in (8, 16, 32)},
    **{f"Based, window 2, d'={n}": (Mixer("window", 2), Mixer("linear", n)) for n in (8, 16, 24, 32)},
}


def sequences(
    count: int, tokens: int, pairs: int, vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens [B, S], positions of the queries [B, K], and the values asked for [B, K].

    Keys and values are drawn without replacement. After the 2K tokens of the pairs come slots of two tokens; each key
    is asked for at the first token of a slot, drawn without replacement by the power law; all other tokens are blank.
    """
    device, half, context = generator.device, vocabulary // 2, 2 * pairs
    noise = lambda columns: torch.rand(count, columns, generator=generator, device=device)
    keys = 1 + noise(half - 1).topk(pairs).indices
    values = half + noise(vocabulary - half).topk(pairs).indices
    slots = (tokens - context) // 2
    # The greatest of log-weights with Gumbel noise are a draw without replacement; in order of size, so shuffle them.
    gumbel = -torch.empty(count, slots, device=device).exponential_(generator=generator).log()
    drawn = (gumbel + (POWER - 1) * torch.arange(1, slots + 1, device=device).log()).topk(pairs).indices
    positions = context + 2 * drawn.gather(1, noise(pairs).argsort(1))
    text = torch.zeros(count, tokens, dtype=torch.long, device=device)
    text[:, 0:context:2], text[:, 1:context:2] = keys, values
    return text.scatter_(1, positions, keys), positions, values


def _frequencies(dim: int) -> torch.Tensor:
    return ROTARY_BASE ** (-torch.arange(dim // 2) / (dim // 2))


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [B, S, H, D]: what a query and a key give depends on how far apart they are."""
    angle = torch.arange(x.shape[1], device=x.device)[:, None, None] * _frequencies(x.shape[3]).to(x.device)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Network(torch.nn.Module):
    """Embedding, x + mixer(norm(x)) twice with one head, norm, the embedding as the output.

    Two things make training many times as short. Queries and keys with rotary positions, which only a first layer has,
    are mostly a constant bias at first, which finds the token before. The second layer's output map begins as the
    inverse of its value map, as in Mimetic Initialization (Trockman and Kolter, 2023): what it finds is an answer.
    """

    def __init__(self, mixers: Sequence[Mixer], vocabulary: int, D: int) -> None:
        super().__init__()
        self.mixers, parameter = mixers, torch.nn.Parameter
        generator = torch.Generator().manual_seed(0)
        random = lambda *shape: torch.randn(*shape, generator=generator)
        self.embedding, self.log_scale = parameter(random(vocabulary, D)), parameter(torch.zeros(()))
        self.inputs, self.outputs, self.biases = (torch.nn.ParameterList() for _ in range(3))
        for layer, mixer in enumerate(mixers):
            dim = mixer.size if mixer.kind == "linear" else D
            value, output = (torch.linalg.qr(random(D, D))[0] for _ in range(2))
            query_key = random(D, 2 * dim) / math.sqrt(D) * (0.1 if mixer.rotary else 1.0)
            self.inputs.append(parameter(torch.cat([query_key, value], 1)))  # [D, 2d + D]
            self.outputs.append(parameter(output if layer == 0 else value.T.clone()))  # [D, D]
            # Turned by one position less than the key's, so that they are alike one token apart.
            turn = _frequencies(dim)
            bias = torch.cat([turn.cos(), -turn.sin(), torch.ones_like(turn), torch.zeros_like(turn)])
            bias = F.pad(ROTARY_BIAS * bias, (0, D)) if mixer.rotary else torch.zeros(2 * dim + D)
            self.biases.append(parameter(bias, requires_grad=mixer.rotary))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [B, K, V] at the positions [B, K] of tokens [B, S]."""
        x = self.embedding[tokens]  # [B, S, D]
        for mixer, into, out, bias in zip(self.mixers, self.inputs, self.outputs, self.biases, strict=True):
            D = x.shape[2]
            dim = (into.shape[1] - D) // 2
            q, k, v = (F.rms_norm(x, (D,)) @ into + bias).unsqueeze(2).split([dim, dim, D], -1)  # [B, S, 1, ·]
            if mixer.rotary:
                q, k = rotate(q), rotate(k)
            half = torch.bfloat16 if x.is_cuda else x.dtype
            x = x + mixer(q.to(half), k.to(half), v.to(half)).squeeze(2).to(x.dtype) @ out
        asked = x.gather(1, positions[..., None].expand(-1, -1, D))
        return F.rms_norm(asked, (D,)) @ self.embedding.T * (self.log_scale.exp() / math.sqrt(D))


def train(network: Network, task: Task, rate: float, device: str) -> None:
    """Adam with a warm-up and a cosine."""
    generator, choices = torch.Generator(device).manual_seed(1), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam((p for p in network.parameters() if p.requires_grad), betas=(0.9, 0.98), eps=1e-9)
    for step in range(1, task.steps + 1):
        pairs = task.pairs[int(torch.randint(len(task.pairs), (), generator=choices))]
        tokens, positions, values = sequences(task.batch, task.tokens, pairs, task.vocabulary, generator)
        F.cross_entropy(network(tokens, positions).flatten(0, 1), values.flatten()).backward()
        share = step / task.steps
        optimizer.param_groups[0]["lr"] = rate * min(share / 0.1, 1.0) * 0.5 * (1 + math.cos(math.pi * share))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def recall(network: Network, tokens: int, pairs: int, task: Task, device: str) -> float:
    """Share of the queries that are answered with the right value, of the whole vocabulary."""
    generator = torch.Generator(device).manual_seed(2)
    right = []
    for _ in range(0, task.tested, 32):
        text, positions, values = sequences(min(32, task.tested), tokens, pairs, task.vocabulary, generator)
        right.append((network(text, positions).argmax(-1) == values).float().mean())
    return torch.stack(right).mean().item()


def measure(mixers: Sequence[Mixer], task: Task, device: str) -> dict[str, Any]:
    """Recall on long sequences by the number of pairs, at the learning rate that is best at the length trained on."""
    best, found = -1.0, {}
    for rate in task.rates:
        network = Network(mixers, task.vocabulary, task.width).to(device)
        train(network, task, rate, device)
        own = sum(recall(network, task.tokens, pairs, task, device) for pairs in task.pairs) / len(task.pairs)
        if own > best:
            best = own
            found = {pairs: recall(network, task.test_tokens, pairs, task, device) for pairs in task.test_pairs}
    state = 4 * sum(mixer.state(task.width, task.test_tokens) for mixer in mixers)
    return {"state_bytes": state, "trained_recall": best, "recall": found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = script_parser("studies.mqar", __doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON to write, after every model")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=Task.steps, help=f"updates of every model (default {Task.steps})")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    task, started = Task(steps=options.steps), time.monotonic()
    record = script_record("studies.mqar", arguments, options.device) | {"task": asdict(task), "models": {}}
    rows: list[list[str]] = []
    caption = f"Percent of the queries answered rightly in {task.test_tokens} tokens, after {task.steps} steps of"
    caption += f" {task.batch} sequences of {task.tokens}, the best of {len(task.rates)} learning rates."
    caption += f" {record['hardware']}, {record['date']}. Made by `{record['command']}`."
    header = ["two layers of", "state, KiB", *(f"{pairs} pairs" for pairs in task.test_pairs)]
    for name in options.models:
        found = record["models"][name] = measure(MODELS[name], task, options.device)
        shares = [f"{100 * share:.1f}" for share in found["recall"].values()]
        rows.append([name, f"{found['state_bytes'] / 1024:,.0f}", *shares])
        print(f"[{time.monotonic() - started:5.0f} s] {' | '.join(rows[-1])}", flush=True)
        write_json(options.output, record | {"tables": [{"header": header, "rows": rows}], "caption": caption})
    return 0


if __name__ == "__main__":
    sys.exit(main())
