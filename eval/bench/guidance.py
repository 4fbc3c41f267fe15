"""Time guidance in one forward call and in two, eager, compiled and with CUDA graphs.

Run by `vmonarch bench guidance`. Wan2.1 1.3B with random weights and VMonarch attention, from a few
small frames to what fills a GPU. All ways are compared with two eager calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from vmonarch.eval.bench.denoiser import TEXT_TOKENS, share_weights
from vmonarch.eval.bench.runner import Bench, Way, Ways
from vmonarch.eval.bench.tables import about, cell, digits, good_rows
from vmonarch.eval.render.table import markdown, shown_number
from vmonarch.eval.wan_models import WanModel, read_model_config
from vmonarch.installation import apply
from vmonarch.processors import VMonarchProcessor

MODEL = "wan2.1-1.3b"
CODES = ("eager", "compiled", "graphs")
METHODS = tuple(f"{calls}-{code}" for code in CODES for calls in ("two", "one"))
FORMULAE = {
    "step": "the transformer's part of a denoising step: both predictions, from latents and text embeddings",
    "two, one": "calls of batch 1 with the prompt and the negative prompt; one call of both, put together in its time",
    "compiled, graphs": "compile_repeated_blocks(fullgraph=True, dynamic=False); the same with mode='reduce-overhead'",
    "error": "‖x − x₀‖ / ‖x₀‖, x₀ of two eager calls",
}


@dataclass(frozen=True)
class Case:
    """A size of video; nothing is trained."""

    frames: int
    height: int
    width: int
    training: bool = False

    @property
    def label(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


CASES = (Case(5, 256, 256), Case(17, 256, 448), Case(17, 480, 832), Case(33, 480, 832), Case(81, 480, 832))


class Predictions:
    """Both predictions of guidance by one transformer.

    Args:
        latents: [1, C, T, h, w]. texts: with the negative prompt and with the prompt, [2, 512, text_dim].
    """

    def __init__(self, transformer: Any, latents: torch.Tensor, texts: torch.Tensor) -> None:
        self.transformer, self.latents, self.texts = transformer, latents, texts
        self.timestep = torch.full((1,), 500, device=latents.device)

    def _predict(self, texts: torch.Tensor) -> torch.Tensor:
        batch = len(texts)
        # Each block's output is the next one's input: to CUDA graphs a forward call is one step.
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            out: torch.Tensor = self.transformer(
                hidden_states=torch.cat([self.latents] * batch),
                timestep=self.timestep.expand(batch),
                encoder_hidden_states=texts,
                return_dict=False,
            )[0]
        return out

    def two(self) -> tuple[torch.Tensor, ...]:
        """Negative and positive, each [1, C, T, h, w]."""
        return tuple(self._predict(text) for text in self.texts.split(1))

    def one(self) -> tuple[torch.Tensor, ...]:
        """The same."""
        return tuple(self._predict(torch.cat(self.texts.split(1))).split(1))


def _inputs(model: WanModel, case: Case, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    size = model.latents(case.frames, case.height, case.width, argument="cases")
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(1, model.transformer["in_channels"], *size, generator=generator, device=device)
    texts = torch.randn(2, TEXT_TOKENS, model.transformer["text_dim"], generator=generator, device=device)
    return latents.to(dtype), texts.to(dtype)


def ways(case: Case, device: torch.device, dtype: torch.dtype) -> Ways:
    """All ways to compute a case, by transformers that share their weights."""
    # Code for the sizes before would count against torch's limit of variants.
    torch.compiler.reset()
    model = read_model_config(MODEL)
    stock: Any = model.build_transformer("transformer", device, dtype)
    apply(stock, VMonarchProcessor())
    inputs = _inputs(model, case, device, dtype)

    def expected() -> dict[str, torch.Tensor]:
        negative, positive = Predictions(stock, *inputs).two()
        return {"negative": negative.float(), "positive": positive.float()}

    def way(method: str) -> Way:
        calls, _, code = method.partition("-")
        transformer: Any = share_weights(stock)
        transformer.set_attention_backend("_native_cudnn" if device.type == "cuda" else "native")
        if code != "eager":
            mode = "reduce-overhead" if code == "graphs" else None
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False, mode=mode)
        predictions = Predictions(transformer, *inputs)
        return Way(
            predictions.two if calls == "two" else predictions.one,
            lambda results: dict(zip(("negative", "positive"), results, strict=True)),
            expected,
            input_bytes=sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        )

    return {method: lambda method=method: way(method) for method in METHODS}  # type: ignore[misc]


def guidance_table(results: dict[str, Any]) -> str:
    """Milliseconds per step of every way, and what a call allocates."""
    rows = []
    for case in results["cases"]:
        good = good_rows(case)

        def show(row: dict[str, Any], good: dict[str, Any] = good) -> str:
            ms, two = row["ms"]["median"], good.get(row["method"].replace("one-", "two-"))
            return digits(ms) + ("" if two is None or two is row else f" ({two['ms']['median'] / ms:.2f}×)")

        peaks = [good.get(f"{calls}-compiled", {}).get("peak_bytes") for calls in ("two", "one")]
        cells = [cell(case, method, show) for method in METHODS]
        rows.append([case["case"].replace("x", "×"), *cells, *(shown_number(peak, 2, factor=1e-9) for peak in peaks)])
    names = [f"{code}, {calls} call{'s' if calls == 'two' else ''}" for code in CODES for calls in ("two", "one")]
    heading = ["video", *names, "GB, two", "GB, one"]
    what = (
        "Milliseconds per step (how many times as fast as two calls), and what is allocated during it (compiled)."
        f" {MODEL}, {results['settings']['attention']}."
    )
    return f"{markdown(heading, rows)}\n{about(results, what)}"


def bench() -> Bench:
    """The benchmark, for the registry."""
    return Bench(
        methods=METHODS,
        ours=METHODS,
        cases=CASES,
        ways=ways,
        formulae=FORMULAE,
        settings={
            "inputs": "standard normal",
            "layout": "latents [1, C, T, h, w]",
            "attention": "VMonarch with its default options",
            "reference": "two eager calls, of the same dtype",
        },
    )
