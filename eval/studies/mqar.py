"""How much small models recall, by the state they keep: `python -m vmonarch.eval.studies.mqar`.

Multi-query associative recall, as in Based, §3.1 and Fig. 2: pairs of a key and a value, then the keys again in another
order; at each the model must name the value. Two-layer models whose mixers are attention, windows, linear attention, or
a window and then linear attention (Based) train on short sequences and are tested on long ones with more pairs. Writes
JSON after every model, and a picture.

Shapes: M copies of a model that train side by side, one per learning rate; B sequences, S tokens, K pairs, D width,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure

from vmonarch.configs import InputError, suggest
from vmonarch.eval.bench.gate import failure
from vmonarch.eval.bench.machine import provenance
from vmonarch.eval.record import script_parser
from vmonarch.eval.render.plot import write_pngs
from vmonarch.eval.render.table import made, markdown
from vmonarch.files import check_output, write_json
from vmonarch.kernels.taylor.api import taylor_attention
from vmonarch.kernels.taylor.feature_maps import FEATURE_MAPS
from vmonarch.kernels.window.api import window_attention
from vmonarch.pipelines.environment import device_name, shown_command

ROOT = Path(__file__).resolve().parents[2]
# Exponent of the law that places the queries, as in the paper's data: slot x is taken with weight x^(POWER - 1).
POWER = 0.01
BETAS, WARMUP = (0.9, 0.98), 0.1
# Of rotary positions; the bias is that of their queries and keys at first.
ROTARY_BASE, ROTARY_BIAS = 100.0, 2.0
# Sequences of a test at a time, and queries that a recall is taken over, at least.
TEST_BATCH, TEST_QUERIES = 64, 4096
BYTES = 4


@dataclass(frozen=True)
class Settings:
    """The task and the training.

    Args:
        vocabulary: tokens; 0 is blank, the lower half are keys, the upper half values.
        tokens, pairs: of the sequences trained on, K taken at random from `pairs` at each step.
        test_tokens, test_pairs: of the test.
        rates: learning rates, one copy of a model each.

    Raises:
        InputError: a number that is not positive, or more pairs than fit.
    """

    vocabulary: int = 8192
    tokens: int = 256
    pairs: tuple[int, ...] = (4, 8, 16, 32, 64)
    test_tokens: int = 1024
    test_pairs: tuple[int, ...] = (4, 16, 64, 128, 256)
    steps: int = 1500
    batch: int = 128
    rates: tuple[float, ...] = (2e-3, 5e-3, 1e-2)
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not numbers or min(numbers) < (0 if field.name == "seed" else 1e-12):
                raise InputError(field.name, f"must be above 0, got {value}")
        for name, pairs, tokens in (
            ("pairs", self.pairs, self.tokens),
            ("test_pairs", self.test_pairs, self.test_tokens),
        ):
            most = min(tokens // 4, self.vocabulary // 2 - 1)
            if max(pairs) > most:
                raise InputError(
                    name, f"must be up to {most} with {tokens} tokens of {self.vocabulary}, got {max(pairs)}"
                )


@dataclass(frozen=True)
class Mixer:
    """One layer.

    Args:
        kind: "attention", "window" or "linear".
        size: tokens of the window; d' of linear attention.
        rotary: whether it knows how far apart tokens are.
    """

    kind: str
    size: int = 0
    feature_map: str = "taylor"
    rotary: bool = False

    def dim(self, width: int) -> int:
        """Of queries and keys."""
        return self.size if self.kind == "linear" else width

    def state(self, width: int, tokens: int) -> int:
        """Numbers kept after so many tokens (Based, Eq. 8, 10 and 11); all d'² products, as our kernels keep them."""
        if self.kind == "linear":
            return FEATURE_MAPS[self.feature_map].features(self.size) * (width + 1)
        return 2 * width * (tokens if self.kind == "attention" else min(tokens, self.size))


@dataclass(frozen=True)
class Model:
    """Two layers of a width; models of a family are one series of the picture."""

    family: str
    name: str
    mixers: tuple[Mixer, Mixer]
    width: int = 128

    def state(self, tokens: int) -> int:
        """Numbers kept after so many tokens."""
        return sum(mixer.state(self.width, tokens) for mixer in self.mixers)


def standard_models() -> list[Model]:
    """Those of the paper's comparison, the ones to be left out last first."""

    def both(family: str, name: str, mixer: Mixer) -> Model:
        return Model(family, name, (dataclasses.replace(mixer, rotary=mixer.kind != "linear"), mixer))

    def window(size: int) -> Model:
        return both("window alone", f"window {size}", Mixer("window", size))

    def linear(dims: int) -> Model:
        return both("linear alone", f"linear d'={dims}", Mixer("linear", dims))

    def rotary(dims: int) -> Model:
        name = "linear alone, rotary"
        return Model(name, f"linear d'={dims}, rotary", (Mixer("linear", dims, rotary=True), Mixer("linear", dims)))

    def based(size: int, dims: int, feature_map: str = "taylor") -> Model:
        family = "Based" if feature_map == "taylor" else f"Based with {feature_map}"
        name = f"{family}, window {size}, d'={dims}"
        # A window of two holds the token before and no other: there is nothing that positions would tell.
        mixers = (Mixer("window", size, rotary=size > 2), Mixer("linear", dims, feature_map))
        return Model(family if size == 2 else "Based, wider window", name, mixers)

    return [
        both("attention", "attention", Mixer("attention")),
        based(2, 16), window(32), linear(16), rotary(16), based(2, 8), window(128), linear(32), based(2, 24),
        based(2, 32), window(8), window(512), linear(8), rotary(32), based(4, 16), based(16, 16),
        based(2, 256, "relu"), based(2, 256, "elu"), based(2, 256, "square"),
        based(2, 64, "relu"), based(2, 64, "elu"), based(2, 64, "square"),
    ]  # fmt: skip


def sequences(
    count: int, tokens: int, pairs: int, vocabulary: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random sequences, on the generator's device and by its state alone.

    Keys and values are drawn without replacement. After the 2K tokens of the pairs come slots of two tokens; each key
    is asked for at the first token of a slot, drawn without replacement by the power law; all other tokens are blank.

    Returns:
        (tokens [B, S], positions of the queries [B, K], the values asked for [B, K]).
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


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of x [B, S, H, D]: what a query and a key give depends on how far apart they are."""
    angle = torch.arange(x.shape[1], device=x.device)[:, None] * _frequencies(x.shape[3], x.device)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def _frequencies(dim: int, device: torch.device | None = None) -> torch.Tensor:
    return ROTARY_BASE ** (-torch.arange(dim // 2, device=device) / (dim // 2))


class Network(torch.nn.Module):
    """M copies of a model: embedding, x + mixer(norm(x)) twice with one head, norm, the embedding as the output.

    Only a first layer knows positions, and only how far apart tokens are, so that longer sequences are like those of
    the training. Two things make training many times as short. Queries and keys with rotary positions are mostly a
    constant bias at first, which finds the token before. The second layer's output map begins as the inverse of its
    value map, as in Mimetic Initialization (Trockman and Kolter, 2023): what attention finds is an answer at once.
    """

    def __init__(self, model: Model, copies: int, settings: Settings, implementation: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.copies, self.vocabulary = model, copies, settings.vocabulary
        self.implementation, self.dtype = implementation, dtype
        generator = torch.Generator().manual_seed(settings.seed)
        D = model.width

        def learnt(tensor: torch.Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(tensor.expand(copies, *tensor.shape).clone())

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.embedding = learnt(random(self.vocabulary, D))  # [M, V, D]
        self.log_scale = learnt(torch.zeros(1, 1))
        self.inputs, self.outputs = torch.nn.ParameterList(), torch.nn.ParameterList()
        self.biases = torch.nn.ParameterDict()
        for layer, mixer in enumerate(model.mixers):
            dim = mixer.dim(D)
            value, output = (torch.linalg.qr(random(D, D))[0] for _ in range(2))
            query_key = random(D, 2 * dim) / math.sqrt(D) * (0.1 if mixer.rotary else 1.0)
            self.inputs.append(learnt(torch.cat([query_key, value], 1)))  # [M, D, 2d + D]
            self.outputs.append(learnt(output if layer == 0 else value.T))  # [M, D, D]
            if mixer.rotary:
                # Turned by one position less than the key's, so that they are alike one token apart.
                turn = _frequencies(dim)
                key = torch.cat([torch.ones_like(turn), torch.zeros_like(turn)])
                bias = ROTARY_BIAS * torch.cat([turn.cos(), -turn.sin(), key])
                self.biases[str(layer)] = learnt(F.pad(bias, (0, D))[None])  # [M, 1, 2d + D]

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [M, B·K, V] at the positions [B, K] of tokens [B, S]."""
        M, D, (B, S) = self.copies, self.model.width, tokens.shape
        first = self.vocabulary * torch.arange(M, device=tokens.device)[:, None, None]
        x = F.embedding(tokens + first, self.embedding.flatten(0, 1)).flatten(1, 2)  # [M, B·S, D]
        for layer, mixer in enumerate(self.model.mixers):
            dim = mixer.dim(D)
            y = F.rms_norm(x, (D,)) @ self.inputs[layer]  # [M, B·S, 2d + D]
            if mixer.rotary:
                y = y + self.biases[str(layer)]
            q, k, v = y.view(M * B, S, 1, -1).split([dim, dim, D], -1)  # [M·B, S, 1, ·]
            if mixer.rotary:
                q, k = rotate(q), rotate(k)
            out = self._mix(mixer, q.to(self.dtype), k.to(self.dtype), v.to(self.dtype))
            x = torch.baddbmm(x, out.to(x.dtype).reshape(M, B * S, D), self.outputs[layer])
        rows = (S * torch.arange(B, device=tokens.device)[:, None] + positions).flatten()
        found = F.rms_norm(x.index_select(1, rows), (D,)) * (self.log_scale.exp() / math.sqrt(D))
        return found @ self.embedding.transpose(1, 2)

    def _mix(self, mixer: Mixer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if mixer.kind == "linear":
            return taylor_attention(
                q, k, v, causal=True, feature_map=mixer.feature_map, implementation=self.implementation
            )
        if mixer.kind == "window":
            return window_attention(q, k, v, window=mixer.size, causal=True, implementation=self.implementation)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def train(network: Network, settings: Settings, device: torch.device) -> list[float]:
    """Adam with a warm-up and a cosine, each copy by its own learning rate.

    Returns:
        the mean loss of every copy over the last twentieth of the steps.
    """
    generator = torch.Generator(device).manual_seed(settings.seed + 1)
    choices = torch.Generator().manual_seed(settings.seed)
    parameters = list(network.parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    rates = torch.tensor(settings.rates, device=device)
    losses = []
    for step in range(1, settings.steps + 1):
        pairs = settings.pairs[int(torch.randint(len(settings.pairs), (), generator=choices))]
        tokens, positions, values = sequences(settings.batch, settings.tokens, pairs, settings.vocabulary, generator)
        logits = network(tokens, positions)
        wanted = values.flatten().repeat(network.copies)
        loss = F.cross_entropy(logits.flatten(0, 1), wanted, reduction="none").view(network.copies, -1).mean(1)
        gradients = torch.autograd.grad(loss.sum(), parameters)
        share = step / settings.steps
        schedule = min(share / WARMUP, 1.0) * 0.5 * (1 + math.cos(math.pi * share))
        correction = math.sqrt(1 - BETAS[1] ** step) / (1 - BETAS[0] ** step)
        with torch.no_grad():
            for p, g, mean, square in zip(parameters, gradients, means, squares, strict=True):
                mean.lerp_(g, 1 - BETAS[0])
                square.lerp_(g * g, 1 - BETAS[1])
                rate = (schedule * correction * rates).view(-1, *(1 for _ in p.shape[1:]))
                p.sub_(rate * mean / (square.sqrt() + 1e-9))
        losses.append(loss.detach())
    return torch.stack(losses[-max(1, settings.steps // 20) :]).mean(0).tolist()


@torch.no_grad()
def recall(network: Network, tokens: int, pairs: int, settings: Settings, device: torch.device) -> list[float]:
    """Share of the queries that each copy answers with the right value, of the whole vocabulary."""
    generator = torch.Generator(device).manual_seed(settings.seed + 2)
    batches = math.ceil(TEST_QUERIES / (TEST_BATCH * pairs))
    right = torch.zeros(network.copies, device=device)
    for _ in range(batches):
        text, positions, values = sequences(TEST_BATCH, tokens, pairs, settings.vocabulary, generator)
        right += (network(text, positions).argmax(-1) == values.flatten()).float().mean(1) / batches
    return right.tolist()


def measure(
    model: Model, settings: Settings, device: torch.device, implementation: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Train a model and test it; of its copies the record is that of the best at the length trained on.

    Seconds include what Triton compiles on the way.
    """
    network = Network(model, len(settings.rates), settings, implementation, dtype).to(device)
    began = time.perf_counter()
    losses = train(network, settings, device)
    trained = time.perf_counter()
    found = {
        str(tokens): {str(pairs): recall(network, tokens, pairs, settings, device) for pairs in counts}
        for tokens, counts in ((settings.tokens, settings.pairs), (settings.test_tokens, settings.test_pairs))
    }
    validation = [
        sum(copies) / len(settings.pairs) for copies in zip(*found[str(settings.tokens)].values(), strict=True)
    ]
    best = max(range(len(validation)), key=validation.__getitem__)
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    return {
        "name": model.name,
        "family": model.family,
        "layers": [dataclasses.asdict(mixer) for mixer in model.mixers],
        "width": model.width,
        "state_numbers": model.state(settings.test_tokens),
        "state_bytes": BYTES * model.state(settings.test_tokens),
        "parameters": sum(p.numel() for p in network.parameters()) // network.copies,
        "steps": settings.steps,
        "training_seconds": round(trained - began, 1),
        "test_seconds": round(time.perf_counter() - trained, 1),
        "learning_rate": settings.rates[best],
        "loss": finite[best],
        "recall": {
            tokens: {pairs: copies[best] for pairs, copies in counts.items()} for tokens, counts in found.items()
        },
        "learning_rates": [
            {"learning_rate": rate, "loss": loss, "recall": mean}
            for rate, loss, mean in zip(settings.rates, finite, validation, strict=True)
        ],
    }


def mqar_table(results: dict[str, Any]) -> str:
    """Recall of every model on the long sequences, by the number of pairs, and its state."""
    settings = results["settings"]
    long, counts = str(settings["test_tokens"]), [str(pairs) for pairs in settings["test_pairs"]]
    families = list(dict.fromkeys(row["family"] for row in results["models"]))
    rows = [
        [row["name"], f"{row['state_bytes'] / 1024:,.0f}", *(f"{100 * row['recall'][long][n]:.1f}" for n in counts)]
        for row in sorted(results["models"], key=lambda row: (families.index(row["family"]), row["state_bytes"]))
    ]
    table = markdown(["two layers of", "state, KiB", *(f"{count} pairs" for count in counts)], rows)
    left = f" Left out for time: {', '.join(results['left_out'])}." if results["left_out"] else ""
    about = (
        f"Percent of the queries answered rightly in sequences of {long} tokens, after"
        f" {settings['steps']:,} steps of {settings['batch']} sequences of {settings['tokens']} tokens with"
        f" {min(settings['pairs'])} to {max(settings['pairs'])} pairs; vocabulary {settings['vocabulary']:,}, width"
        f" {results['models'][0]['width']}, the best of {len(settings['rates'])} learning rates at the length trained"
        f" on.{left} "
    )
    return made(results, table, about)


# Okabe and Ito's colours, and a marker each for prints in grey.
_STYLES = {
    "attention": ("#555555", "s"),
    "window alone": ("#E69F00", "D"),
    "linear alone": ("#D55E00", "^"),
    "linear alone, rotary": ("#F0E442", "<"),
    "Based": ("#0072B2", "o"),
    "Based, wider window": ("#000000", "*"),
    "Based with relu": ("#56B4E9", "v"),
    "Based with elu": ("#009E73", "P"),
    "Based with square": ("#CC79A7", "X"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """State against recall on the long sequences, for as many pairs as were trained on and for most (Based, Fig. 2)."""
    settings = results["settings"]
    long, most = str(settings["test_tokens"]), max(settings["test_pairs"])
    trained = max((n for n in settings["test_pairs"] if n <= max(settings["pairs"])), default=most)
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    for ax, pairs in zip(figure.subplots(1, 2, sharey=True), (trained, most), strict=True):
        for family, (colour, marker) in _STYLES.items():
            points = sorted(
                (row["state_bytes"], 100 * row["recall"][long][str(pairs)])
                for row in results["models"]
                if row["family"] == family
            )
            if points:
                ax.plot(*zip(*points, strict=True), color=colour, marker=marker, label=family, alpha=0.9)
        ax.set_xscale("log")
        ax.set_title(f"{pairs} pairs in {long} tokens")
        ax.set_xlabel("state of both layers, bytes")
        ax.set_ylim(-3, 103)
        ax.grid(alpha=0.3)
    figure.axes[0].set_ylabel("queries answered rightly, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    write_pngs({path: figure})


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError("device", f"must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", f"must be cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device", f"{name!r} cannot be used: there is no CUDA device here")
    return device


def choose(names: Sequence[str]) -> list[Model]:
    """The standard models of these names or families; all for none.

    Raises:
        InputError: no model has the name.
    """
    models = standard_models()
    known = {text for model in models for text in (model.name, model.family)}
    for name in names:
        if name not in known:
            raise InputError("models", f"must be of {', '.join(sorted(known))}; got {name!r}{suggest(name, known)}")
    return [model for model in models if not names or {model.name, model.family} & set(names)]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; exit code 1 if a model failed."""
    parser = script_parser("studies.mqar", __doc__, whole=True)
    for field in dataclasses.fields(Settings):
        many = isinstance(field.default, tuple)
        kind = float if field.name == "rates" else int
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=kind, nargs="+" if many else None, default=field.default
        )
    parser.add_argument("--models", nargs="+", default=[], help="names or families; all if left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--implementation", choices=("triton", "torch"), help="of the mixers; triton on CUDA")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the mixers; bfloat16 on CUDA")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds after which no model is begun")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/benchmarks/mqar.json")
    parser.add_argument("--picture", type=Path, default=ROOT / "docs/images/mqar.png")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(options).items()
        if name in Settings.__dataclass_fields__
    }
    settings = Settings(**given)
    models, device = choose(options.models), _device(options.device)
    check_output(options.output)
    check_output(options.picture)
    on_gpu = device.type == "cuda"
    implementation = options.implementation or ("triton" if on_gpu else "torch")
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {
        **provenance(device, shown_command(("python", "-m", "vmonarch.eval.studies.mqar"), arguments)),
        "hardware": device_name(device),
        "settings": {
            **dataclasses.asdict(settings),
            "implementation": implementation,
            "dtype": dtype,
            "query_power": POWER,
            "state": "numbers kept by both layers at the test's length, 4 bytes each: attention 2·D·S, window w"
            " 2·D·min(S, w), linear attention (D + 1)·(1 + d' + d'²), with other maps than Taylor's (D + 1)·d'",
        },
        "models": [],
        "left_out": [],
        "failed": [],
        "seconds": 0.0,
    }
    for model in models:
        if time.monotonic() - started > options.budget:
            results["left_out"].append(model.name)
            continue
        try:
            record = measure(model, settings, device, implementation, getattr(torch, dtype))
        except Exception as error:
            problem = failure(error)["problem"]
            results["failed"].append({"name": model.name, "problem": problem})
            print(f"{model.name} failed: {problem}", file=sys.stderr)
            continue
        results["models"].append(record)
        results["seconds"] = round(time.monotonic() - started, 1)
        write_json(options.output, results)
        scores = " ".join(f"{n}:{share:.3f}" for n, share in record["recall"][str(settings.test_tokens)].items())
        print(f"[{results['seconds']:6.1f} s] {model.name:34s} rate {record['learning_rate']:g} {scores}", flush=True)
    write_json(options.output, results)
    if results["models"]:
        draw(results, options.picture)
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
