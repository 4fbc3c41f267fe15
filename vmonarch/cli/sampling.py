"""Arguments that `generate` and `compare` share."""

from __future__ import annotations

import argparse
import re
from typing import Any

from vmonarch.configs import InputError, is_override, parse_overrides, preset_names, read_yaml

# `num-frames=5`: one word, and but for the hyphens a key and its value.
_LIKE_OVERRIDE = re.compile(r"([a-z][a-z0-9_]*(?:-[a-z0-9_]+)+)=(\S*)", re.ASCII)
# One word of a script that puts blanks between words: Latin, Greek, Cyrillic.
_BARE_WORD = re.compile(r"[!-\u052f]+")
# dest, option, type, metavar, help: each is the field of `SamplingConfig` of that name.
_OPTIONS: tuple[tuple[str, str, Any, str, str], ...] = (
    ("height", "--height", int, "PIXELS", "a multiple of 16"),
    ("width", "--width", int, "PIXELS", "a multiple of 16"),
    ("num_frames", "--num-frames", int, "N", "4·k + 1"),
    ("steps", "--steps", int, "N", "denoising steps"),
    ("guidance", "--guidance", float, "SCALE", "classifier-free guidance; 1 or less turns it off"),
    ("guidance_2", "--guidance-2", float, "SCALE", "the same for the low-noise transformer of Wan 2.2 A14B"),
    ("flow_shift", "--flow-shift", float, "SHIFT", "shift of the scheduler's noise levels"),
    ("negative_prompt", "--negative-prompt", str, "TEXT", "what guidance leads away from"),
    ("fps", "--fps", float, "RATE", "frames per second of the mp4"),
    ("max_sequence_length", "--max-sequence-length", int, "TOKENS", "text tokens that the transformer sees"),
)


def add_sampling_arguments(parser: argparse.ArgumentParser, *, group: str, overwrite: bool = True) -> None:
    """Declare prompts, seeds, sizes, devices and outputs.

    Args:
        group: the folder of YAML files that --config knows.
        overwrite: whether the command can replace what it wrote before.
    """
    parser.add_argument(
        "prompts", nargs="*", metavar="prompt", help="what the video shows; key=value overrides may stand here too"
    )
    parser.add_argument("--prompt-file", metavar="FILE", help="a prompt a line, UTF-8")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="embedded (default), a folder of a Wan pipeline, or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")
    parser.add_argument("--image", metavar="FILE", help="first frame, for image-to-video models")
    parser.add_argument(
        "--seed",
        dest="seeds",
        nargs="+",
        metavar="N",
        help="one or several; every prompt gets each (default 0)",
    )
    sizes = parser.add_argument_group("sampling (default: what the model recommends)")
    for dest, option, kind, metavar, text in _OPTIONS:
        sizes.add_argument(option, dest=dest, type=kind, metavar=metavar, help=text)
    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--dtype",
        metavar="TYPE",
        help="auto (default: float32 on CPU, bfloat16 on CUDA), float32, bfloat16, float16; the VAE stays float32",
    )
    machine.add_argument(
        "--device", metavar="DEVICE", help="auto (default: cuda where there is one), cpu, cuda, cuda:N"
    )
    machine.add_argument(
        "--offload", metavar="HOW", help="none (default), model, group: keep weights on the CPU meanwhile"
    )
    machine.add_argument("--batch-size", type=int, metavar="N", help="videos sampled together (default 1)")
    output = parser.add_argument_group("configuration and output")
    known = ", ".join(preset_names(group))
    output.add_argument("--config", metavar="FILE", help=f"YAML file, or one of {known}")
    output.add_argument("--output-dir", metavar="FOLDER", help=f"default: outputs/{group}")
    if overwrite:
        output.add_argument(
            "--overwrite", action="store_true", default=None, help="number from 0001 and replace files of the same name"
        )
    output.add_argument("--quiet", action="store_true", help="no progress bars; print paths only")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which methods sample, and which of them is the reference."""
    parser.add_argument(
        "--methods",
        nargs="+",
        metavar="METHOD",
        help=f"of {', '.join(preset_names('attention'))}, or METHOD:key=value,… (default full vmonarch)",
    )
    parser.add_argument("--reference", metavar="METHOD", help="what the others are measured against (default full)")


def move_overrides(arguments: argparse.Namespace, *names: str) -> None:
    """Put the overrides among the words of some options where `sampling_layers` looks for them.

    `--methods full vmonarch steps=3`: they may stand anywhere, and nothing that these options take is named like one.
    """
    for name in names:
        words = getattr(arguments, name)
        if words is not None:
            arguments.prompts += [word for word in words if is_override(word)]
            setattr(arguments, name, [word for word in words if not is_override(word)])


def sampling_layers(arguments: argparse.Namespace, *, group: str, own: tuple[str, ...]) -> list[dict[str, Any]]:
    """Layers for `build_config`, lowest first: the YAML file, the options, the overrides.

    Args:
        own: options of the command itself that are fields of its config.

    Raises:
        InputError: an unreadable file or a malformed override.
    """
    layers = []
    if arguments.config is not None:
        layers.append(read_yaml(arguments.config, group=group))
    fields = [
        "model",
        "revision",
        "image",
        "seeds",
        "dtype",
        "device",
        "offload",
        "batch_size",
        "output_dir",
        "overwrite",
    ]
    fields += [option[0] for option in _OPTIONS] + list(own)
    words = list(arguments.prompts)
    if arguments.seeds is not None:
        # `--seed 1 2 steps=3`: overrides may stand anywhere.
        words += [word for word in arguments.seeds if is_override(word)]
        arguments.seeds = [_seed(word) for word in arguments.seeds if not is_override(word)]
    given = {name: value for name in fields if (value := getattr(arguments, name, None)) is not None}
    prompts = [word for word in words if not is_override(word)]
    _check_prompt_words(prompts)
    if arguments.prompt_file is not None:
        from vmonarch.pipelines.config import read_prompts

        prompts += read_prompts(arguments.prompt_file)
    if prompts:
        given["prompts"] = prompts
    layers.append(given)
    # A layer each: `attention=full attention.coarse=2` has to be read in that order.
    layers += [parse_overrides([word]) for word in words if is_override(word)]
    return layers


def _check_prompt_words(prompts: list[str]) -> None:
    """Check that what stands for prompts on the command line is no misspelt override, and no prompt without its quotes.

    Raises:
        InputError: it is.
    """
    for word in prompts:
        if found := _LIKE_OVERRIDE.fullmatch(word):
            key = found.group(1).replace("-", "_")
            raise InputError(
                "prompts",
                f"must not look like an override, got {word!r}; write {key}={found.group(2)}, or --prompt-file",
            )
    if len(prompts) > 1 and all(_BARE_WORD.fullmatch(word) for word in prompts):
        line = " ".join(prompts)
        raise InputError(
            "prompts",
            f"must stand in quotes, or each word is a prompt of its own: {line!r}; for prompts of one word use"
            " --prompt-file",
        )


def _seed(word: str) -> int:
    try:
        return int(word)
    except ValueError as error:
        raise InputError("seeds", f"must be integers, got {word!r}; prompts go before --seed") from error


def hide_loading_bars() -> None:
    """Switch off the bars that diffusers and transformers show for every file they load; ours say what matters."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
