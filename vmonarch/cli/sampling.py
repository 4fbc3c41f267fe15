"""Arguments that several commands share, and the settings that they make up."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from vmonarch.configs import InputError, is_override, parse_overrides, preset_names, read_yaml

if TYPE_CHECKING:
    from vmonarch.pipelines.config import SamplingConfig

Config = TypeVar("Config", bound="SamplingConfig")

# `num-frames=5`: one word, and but for the hyphens a key and its value.
_LIKE_OVERRIDE = re.compile(r"([a-z][a-z0-9_]*(?:-[a-z0-9_]+)+)=(\S*)", re.ASCII)
# One word of a script that puts blanks between words: Latin, Greek, Cyrillic.
_BARE_WORD = re.compile(r"[!-\u052f]+")
# option, type, metavar, help: each is the field of `SamplingConfig` of that name.
_OPTIONS: tuple[tuple[str, Any, str, str], ...] = (
    ("--height", int, "PIXELS", "a multiple of 16"),
    ("--width", int, "PIXELS", "a multiple of 16"),
    ("--num-frames", int, "N", "4·k + 1 (LTX: 8·k + 1)"),
    ("--steps", int, "N", "denoising steps"),
    ("--guidance", float, "SCALE", "classifier-free guidance; 1 or less turns it off"),
    ("--true-guidance", float, "SCALE", "classifier-free guidance of HunyuanVideo, beside its embedded one"),
    ("--guidance-2", float, "SCALE", "the same for the low-noise transformer of Wan 2.2 A14B"),
    ("--scheduler", str, "NAME", "unipc, euler or lcm, for models of a few steps (default: the model's own)"),
    ("--flow-shift", float, "SHIFT", "shift of the scheduler's noise levels"),
    ("--negative-prompt", str, "TEXT", "what guidance leads away from"),
    ("--fps", float, "RATE", "frames per second of the mp4"),
    ("--max-sequence-length", int, "TOKENS", "text tokens that the transformer sees"),
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
    add_model_arguments(parser, "a pipeline")
    for option, about in (("--lora", ""), ("--lora-2", ", for the low-noise transformer of Wan 2.2 A14B")):
        parser.add_argument(
            option,
            action="append",
            metavar="FILE[:SCALE]",
            help=f"LoRA layers to fuse with the weights{about}; may be repeated",
        )
    parser.add_argument("--image", metavar="FILE", help="first frame, cropped to fit, for image-to-video models")
    parser.add_argument(
        "--seed",
        dest="seeds",
        nargs="+",
        metavar="N",
        help="one or several; every prompt gets each (default 0)",
    )
    sizes = parser.add_argument_group("sampling (default: what the model recommends)")
    for option, kind, metavar, text in _OPTIONS:
        sizes.add_argument(option, type=kind, metavar=metavar, help=text)
    sizes.add_argument(
        "--sigmas", type=_numbers, metavar="S,S,…", help="noise levels of euler's or lcm's steps, such as 1,0.757,0.522"
    )
    machine = add_machine_arguments(parser)
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


def add_model_arguments(parser: argparse.ArgumentParser, kind: str = "a Wan pipeline") -> None:
    """Declare the model and its version.

    Args:
        kind: of the models that the command takes.
    """
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"embedded (default), a folder of {kind}, or a hub id such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub model")


def method_help() -> str:
    """What names a method on the command line."""
    attention, recipes = (", ".join(preset_names(group)) for group in ("attention", "recipes"))
    return f"{attention}, a recipe ({recipes}), or METHOD:key=value,…"


def add_machine_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Declare what is computed on and in; returns the group, for more of its kind."""
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
    return machine


def add_recipe_argument(parser: argparse.ArgumentParser, option: str, **several: Any) -> None:
    """Declare `--recipe`, another name of an option that takes methods and recipes."""
    parser.add_argument(
        "--recipe", dest=option, type=_recipe, metavar="RECIPE", default=None, help=f"as --{option}", **several
    )


def _recipe(text: str) -> str:
    from vmonarch.configs.methods import OLD_RECIPES

    name = text.partition(":")[0]
    if name in OLD_RECIPES:
        raise argparse.ArgumentTypeError(f"{name!r} is an attention method; the recipe is {OLD_RECIPES[name]!r}")
    return text


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare which methods sample, and which of them is the reference."""
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help=f"of {method_help()} (default full vmonarch)")
    add_recipe_argument(parser, "methods", nargs="+")
    parser.add_argument("--reference", metavar="METHOD", help="what the others are measured against (default full)")


def sampling_layers(schema: type, arguments: argparse.Namespace, *several: str) -> list[dict[str, Any]]:
    """`config_layers` of a command that samples.

    Args:
        several: options that take several words. Overrides may stand among these, as in `--methods full vmonarch
            steps=3`: nothing that they take is named like one.

    Raises:
        InputError: an unreadable file, a malformed override, prompts without quotes, or a seed that is no number.
    """
    words = list(arguments.prompts)
    for name in (*several, "seeds"):
        values = getattr(arguments, name)
        if values is not None:
            words += filter(is_override, values)
            setattr(arguments, name, [value for value in values if not is_override(value)])
    if arguments.seeds is not None:
        arguments.seeds = [_seed(word) for word in arguments.seeds]
    prompts = [word for word in words if not is_override(word)]
    _check_prompt_words(prompts)
    if arguments.prompt_file is not None:
        from vmonarch.pipelines.config import read_prompts

        prompts += read_prompts(arguments.prompt_file)
    arguments.prompts = prompts or None
    return config_layers(schema, arguments, arguments.words[0], filter(is_override, words))


def config_layers(
    schema: type, arguments: argparse.Namespace, group: str, overrides: Iterable[str]
) -> list[dict[str, Any]]:
    """What makes up a config, lowest first: the YAML file, the options that are fields of `schema`, the overrides.

    Raises:
        InputError: an unreadable file or a malformed override.
    """
    layers = [] if arguments.config is None else [read_yaml(arguments.config, group=group)]
    names = (field.name for field in dataclasses.fields(schema))
    layers.append({name: value for name in names if (value := getattr(arguments, name, None)) is not None})
    # A layer each: `attention=full attention.coarse=2` has to be read in that order.
    return layers + [parse_overrides([word]) for word in overrides]


def sampling_config(schema: type[Config], layers: Sequence[Mapping[str, Any]], *sources: str) -> Config:
    """The config that `layers` make up, which must have prompts.

    Args:
        sources: options that give prompts.

    Raises:
        InputError: there are none, or a value cannot be used.
    """
    from vmonarch.pipelines.config import build_config

    config = build_config(schema, *layers)
    if not config.prompts:
        raise InputError("prompts", f"is missing: give one or more prompts, or {' or '.join(sources)}")
    return config


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


def _numbers(word: str) -> list[float]:
    try:
        return [float(number) for number in word.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {word!r}") from error


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
