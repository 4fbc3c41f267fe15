"""The same prompts and seeds through several methods: what comparisons, evaluations and the page sample by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from vmonarch.eval.settings import MethodsConfig
from vmonarch.pipelines import recipes
from vmonarch.pipelines.loading import LoadedModel, complete_and_load
from vmonarch.pipelines.model_folder import PROXY_RECORD
from vmonarch.pipelines.sampling import Batch, decode, denoise, sample

if TYPE_CHECKING:
    import torch

Methods = TypeVar("Methods", bound="MethodsConfig")


def load_for(config: Methods, model: LoadedModel | None) -> tuple[Methods, LoadedModel]:
    """The completed config and its pipeline; methods that the pipeline cannot carry show before minutes are spent.

    Args:
        model: a pipeline loaded before with the same model settings, or None.

    Raises:
        InputError, ModelError: as `vmonarch.pipelines.generation.generate`.
    """
    config, model = complete_and_load(config, model)
    for method in config.methods:
        recipes.apply(model.pipe, method, steps=config.steps)
    return config, model


def warm_up(model: LoadedModel, config: MethodsConfig, batch: Sequence[tuple[str, int]], *, progress: bool) -> None:
    """One step of every method, and one decoding, at the full shape of a batch of prompts and seeds.

    Nothing that is timed afterwards is charged for compilation, or for what the first call of a process initialises.
    A method that compiles runs all its steps: each kind of step compiles something, and the last kind may come late.
    """
    prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
    latents = None
    for method in config.methods:
        title = f"warm-up, {method.label}" if progress else None
        steps = config.steps if method.stack.compile else 1
        if steps == 1:
            # The only step may be a dense one, which would warm up nothing of the method.
            method = method.without_dense()
        recipes.apply(model.pipe, method, steps=config.steps)
        latents = denoise(model, config, prompts, seeds, steps=steps, progress=title).latents
    assert latents is not None
    decode(model.pipe, latents[:1])


def sample_methods(
    model: LoadedModel, config: MethodsConfig, batch: Sequence[tuple[str, int]], *, title: str | None
) -> dict[str, Batch]:
    """A batch of prompts and seeds through every method, by the methods' labels.

    Args:
        title: of the progress bar; None for none.
    """
    prompts, seeds = [prompt for prompt, _ in batch], [seed for _, seed in batch]
    samples: dict[str, Batch] = {}
    for method in config.methods:
        recipes.apply(model.pipe, method, steps=config.steps)
        shown = None if title is None else f"{title}, {method.label}"
        samples[method.label] = sample(model, config, prompts, seeds, progress=shown)
    return samples


def prompt_scorer(model: LoadedModel, prompt_set: str | None = None) -> Callable[[torch.Tensor, str], float | None]:
    """A function of frames [F, 3, H, W] and prompt to the prompt score (`vmonarch.eval.prompt_score.PromptMatch`).

    It answers None for prompts in other words than the embedded model's, and, unless its prompts are asked for by
    `prompt_set`, for models other than that one and its proxies (`vmonarch.finetune.embedded`).
    """
    ours = model.folder.name == "embedded" or prompt_set == "embedded"
    if not ours and not (model.folder.path / PROXY_RECORD).is_file():
        return lambda frames, prompt: None
    from vmonarch.eval.prompt_score import parse_prompt, score_video

    def score(frames: torch.Tensor, prompt: str) -> float | None:
        if len(frames) < 2 or not parse_prompt(prompt):
            return None
        return score_video(frames.permute(0, 2, 3, 1), prompt).score

    return score
