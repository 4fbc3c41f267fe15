"""What to generate for VBench and how to find it again: the standard prompts, custom ones, and lists of videos."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmonarch.configs import InputError
from vmonarch.eval.vbench.dimensions import check_dimensions
from vmonarch.eval.vbench.environment import VBenchEnvironment, load_environment
from vmonarch.eval.vbench.scoring import PromptedVideo

# What VBench asks for, of every dimension but temporal_flickering, for which it asks for 25.
VIDEOS_PER_PROMPT = 5
# Seeds of neighbouring prompts lie this far apart.
_MOST_VIDEOS_PER_PROMPT = 25


@dataclass(frozen=True)
class SuiteItem:
    """A video to generate.

    Args:
        prompt: text of the video.
        index: which of the prompt's videos it is.
        seed: of its noise, different for every video of a suite.
        dimensions: of VBench that judge it.
    """

    prompt: str
    index: int
    seed: int
    dimensions: tuple[str, ...] = ()


def standard_suite(
    dimensions: Sequence[str],
    environment: VBenchEnvironment | None = None,
    *,
    videos_per_prompt: int = VIDEOS_PER_PROMPT,
    seed: int = 0,
) -> list[SuiteItem]:
    """The videos that VBench's standard prompts ask for, read from the installed package.

    A prompt that several dimensions judge is there once. A video's seed depends on its prompt, its index and `seed`,
    but not on the dimensions: the suite of some dimensions is part of the suite of all.

    Args:
        dimensions: names from DIMENSIONS.
        environment: in which the package is installed; default: that in `default_folder()`.
        videos_per_prompt: 1 to 25.
        seed: of the first video of the package's first prompt.

    Raises:
        InputError: no or unknown dimensions, another number of videos, no environment.
    """
    check_dimensions(dimensions)
    judged: dict[str, list[str]] = {}
    full_info = json.loads((environment or load_environment()).full_info.read_text(encoding="utf-8"))
    for entry in full_info:
        judged.setdefault(entry["prompt_en"], []).extend(entry["dimension"])
    items = custom_suite(list(judged), videos_per_prompt=videos_per_prompt, seed=seed)
    chosen = [(item, tuple(name for name in dimensions if name in judged[item.prompt])) for item in items]
    return [SuiteItem(item.prompt, item.index, item.seed, names) for item, names in chosen if names]


def custom_suite(
    prompts: Sequence[str], *, videos_per_prompt: int = VIDEOS_PER_PROMPT, seed: int = 0
) -> list[SuiteItem]:
    """The videos of prompts of one's own.

    Raises:
        InputError: no prompt, an empty one or one twice, or a number of videos outside 1 to 25.
    """
    if not 1 <= videos_per_prompt <= _MOST_VIDEOS_PER_PROMPT:
        raise InputError("videos_per_prompt", f"must be 1 to {_MOST_VIDEOS_PER_PROMPT}, got {videos_per_prompt}")
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise InputError("prompts", "must be one or more prompts, none of them empty")
    if len(set(prompts)) < len(prompts):
        raise InputError("prompts", "must differ; videos_per_prompt asks for several videos of a prompt")
    return [
        SuiteItem(prompt, index, seed + place * _MOST_VIDEOS_PER_PROMPT + index)
        for place, prompt in enumerate(prompts)
        for index in range(videos_per_prompt)
    ]


def suite_videos(videos: Sequence[PromptedVideo], suite: Sequence[SuiteItem], dimension: str) -> list[PromptedVideo]:
    """The videos that a dimension judges, in the order of the suite.

    Raises:
        InputError: the suite has no video for the dimension, a video of the suite is missing, or one is there twice.
    """
    found: dict[tuple[str, int], PromptedVideo] = {}
    for video in videos:
        other = found.setdefault((video.prompt, video.index), video)
        if other is not video:
            raise InputError("videos", f"{other.path} and {video.path} are of the same prompt and index")
    wanted = [(item.prompt, item.index) for item in suite if dimension in item.dimensions]
    if not wanted:
        raise InputError("suite", f"has no video for {dimension}")
    missing = [key for key in wanted if key not in found]
    if missing:
        prompt, index = missing[0]
        raise InputError(
            "videos",
            f"lack {len(missing)} of {len(wanted)} videos for {dimension}, the first: {prompt!r}, index {index}",
        )
    return [found[key] for key in wanted]


def read_videos(path: Path, folder: Path | None = None) -> list[PromptedVideo]:
    """Videos from a JSON list, or a JSON Lines file (`.jsonl`), of `{"file": …, "prompt": …, "index": 0}`.

    Args:
        folder: that files are relative to; default: the one with the list.

    Raises:
        InputError: the list cannot be read, is empty, or an entry lacks file or prompt or has another type.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            entries = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            entries = json.loads(text)
    except (OSError, ValueError) as error:
        raise InputError("videos", f"must be a JSON or JSON Lines file; {path} cannot be read: {error}") from error
    if not isinstance(entries, list) or not entries:
        raise InputError("videos", f"must be a list of one or more videos; {path} is none")
    base = folder or path.parent
    return [_video(entry, base, f"entry {place + 1} of {path}") for place, entry in enumerate(entries)]


def _video(entry: Any, base: Path, where: str) -> PromptedVideo:
    match entry:
        case {"file": str(file), "prompt": str(prompt)}:
            index = entry.get("index", 0)
            # A bool is an integer, too.
            if type(index) is int and index >= 0:
                return PromptedVideo(base / file, prompt, index)
    form = '{"file": text, "prompt": text, "index": integer from 0, 0 if left out}'
    raise InputError("videos", f"must be like {form}; {where} is not")
