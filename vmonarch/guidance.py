"""Classifier-free guidance in one forward call a step.

Pipelines ask the transformer twice a step: with the prompt, then with the negative prompt. Both calls have the same
latents, so that the first can compute the second's answer along with its own, in a batch of twice the size.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from vmonarch.arguments import same_arguments, same_value
from vmonarch.families import known_family
from vmonarch.installation import find_transformers

# The transformers' arguments whose first dimension is the batch.
_BATCHED = (
    "hidden_states",
    "timestep",
    "encoder_hidden_states",
    "encoder_hidden_states_image",
    "control_hidden_states",
    "pose_hidden_states",
    "face_pixel_values",
)
# Tensors that are the same for every sample.
_SHARED = ("control_hidden_states_scale",)

Forward = Callable[..., Any]


@contextlib.contextmanager
def batched_guidance(pipe: Any) -> Iterator[None]:
    """Compute both predictions of classifier-free guidance in one forward call of twice the batch, within this block.

        with vmonarch.batched_guidance(pipe):
            video = pipe("a lighthouse in a storm").frames[0]

    Meant for small videos, of which one does not fill the GPU; activations need twice the memory. Results are the same
    up to rounding. Without guidance (`guidance_scale` at most 1) nothing changes.

    What the second call will ask is foreseen: what the first asked, but with the negative prompt. An answer is only
    given to exactly the question that was foreseen; any other (a callback has changed the negative prompt) is computed
    as it comes, and foreseen from then on.

    Args:
        pipe: a Wan-family pipeline, of diffusers or of `vmonarch.pipelines`. Enable offloading and caches before the
            block; with model offloading (`enable_model_cpu_offload`) one block holds one call of the pipeline.

    Raises:
        TypeError: `pipe` is not such a pipeline.
        ValueError: a transformer is compiled in place (`transformer.compile()`), or its guidance is batched already; or
            the embeddings of prompt and negative prompt differ in shape.
        NotImplementedError: a transformer is called with a tensor of which it is not known how to batch it, or a step's
            calls differ in something that is no batch.
        RuntimeError: a step's second question was not the one foreseen, of a transformer whose cache (`enable_cache`)
            has recorded the answer already; or a transformer's forward has been replaced since the block began.
    """
    if isinstance(pipe, torch.nn.Module) or not hasattr(pipe, "encode_prompt"):
        raise TypeError(f"pipe must be a Wan-family pipeline, got {type(pipe).__name__}")
    found = find_transformers(pipe)
    for name, transformer in found.items():
        if not known_family(transformer).own:
            raise TypeError(f"pipe must be a Wan-family pipeline, got {type(pipe).__name__}")
        module = getattr(pipe, name)
        if module._compiled_call_impl is not None:
            raise ValueError(
                f"{name} is compiled in place, below which guidance cannot be batched: use"
                f" {name}.compile_repeated_blocks(...) or pipe.{name} = torch.compile(pipe.{name}, ...)"
            )
        if isinstance(vars(module).get("forward"), _GuidedForward):
            raise ValueError(f"the guidance of {name} is batched already")

    forwards = {name: _GuidedForward(pipe, name, transformer) for name, transformer in found.items()}
    encode_prompt = pipe.encode_prompt

    @functools.wraps(encode_prompt)
    def encode(*args: Any, **kwargs: Any) -> Any:
        embeddings, negative = encode_prompt(*args, **kwargs)
        for forward in forwards.values():
            forward.begin(negative)
        return embeddings, negative

    with contextlib.ExitStack() as stack:
        stack.callback(_put_back, pipe, "encode_prompt", encode, vars(pipe).get("encode_prompt"))
        pipe.encode_prompt = encode
        for forward in forwards.values():
            stack.enter_context(forward.installed())
        yield


def _put_back(owner: Any, name: str, ours: Any, before: Any) -> None:
    """Undo that an object got an attribute of its own, unless someone else has set it since; theirs stays."""
    if vars(owner).get(name) is ours:
        delattr(owner, name) if before is None else setattr(owner, name, before)


class _GuidedForward:
    """A transformer's forward that answers two calls by one.

    Args:
        pipe: the pipeline that calls it.
        name: name of the transformer in it.
        transformer: the transformer itself, without torch.compile's wrapper.
    """

    def __init__(self, pipe: Any, name: str, transformer: Any) -> None:
        self._pipe, self._name, self._transformer = pipe, name, transformer
        # A transformer inside torch.compile's wrapper is compiled as it is: the wrapper gets the new forward.
        self._owner = getattr(pipe, name)
        self._forward: Forward = self._owner.forward
        # The forward that hooks have set on this one object, if any.
        self._before: Forward | None = vars(self._owner).get("forward")
        # What the second call has instead of the first one's arguments; None before a prompt is encoded.
        self._other: dict[str, Any] | None = None
        # (the first call's arguments, those foreseen for the second, the answer to these).
        self._prepared: tuple[Mapping[str, Any], Mapping[str, Any], Any] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        self._owner.forward = self
        try:
            yield
        finally:
            _put_back(self._owner, "forward", self, self._before)

    def _compute(self, *args: Any, **inputs: Any) -> Any:
        output = self._forward(*args, **inputs)
        now = vars(self._owner).get("forward")
        if now is not self:
            # A hook has taken itself off in the call, as that of group offloading with a stream does after the first.
            self._forward, self._before = self._owner.forward, now
            self._owner.forward = self
        return output

    def begin(self, negative: torch.Tensor | None) -> None:
        """A pipeline's run begins: the second call of a step will have these text embeddings."""
        # Model offloading takes its hooks off at the end of a run and puts them on anew, in place of this one.
        if vars(self._owner).get("forward") is not self:
            raise RuntimeError(
                f"the forward of {self._name} has been replaced (by offloading, or a cache enabled since), so that its"
                " guidance is no longer batched: put each call of the pipeline into a block of its own, with"
                " vmonarch.batched_guidance(pipe)"
            )
        self._other = None if negative is None else {"encoder_hidden_states": negative}
        self._prepared = None

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        # Pipelines give every argument by name and want a tuple; who calls otherwise wants this one answer.
        if self._other is None or args or inputs.get("return_dict", True):
            return self._compute(*args, **inputs)
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return self._both(inputs) if self._pipe.do_classifier_free_guidance else self._compute(**inputs)
        first, foreseen, answer = prepared
        if same_arguments(foreseen, inputs):
            # From now on these very tensors, which tell by identity that nothing has changed.
            self._other = {name: inputs[name] for name in self._other}
            return answer
        self._other = {name: value for name, value in inputs.items() if not same_value(value, first.get(name))}
        apart = [name for name in self._other if name not in _BATCHED]
        if apart:
            raise NotImplementedError(f"guidance cannot be batched: {apart[0]} differs between the two calls of a step")
        if getattr(self._transformer, "is_cache_enabled", False):
            differ = ", ".join(name for name in inputs if not same_value(inputs[name], foreseen.get(name)))
            raise RuntimeError(
                f"guidance cannot be batched together with a cache here: {self._name} was called with another {differ}"
                " than foreseen, and its cache has recorded the answer to that; call disable_cache, or do without"
                " vmonarch.batched_guidance"
            )
        return self._compute(**inputs)

    def _both(self, inputs: dict[str, Any]) -> Any:
        """The answer to `inputs`; the one to the call that will follow is prepared."""
        assert self._other is not None
        like = inputs["encoder_hidden_states"]
        # Pipelines cast what encode_prompt returns.
        foreseen = inputs | {
            name: value.to(like) if name == "encoder_hidden_states" else value for name, value in self._other.items()
        }
        # Negative first: the order of diffusers, on which FasterCache relies.
        both = inputs | {name: torch.cat([foreseen[name], inputs[name]]) for name in self._batched(inputs, foreseen)}
        (output,) = self._compute(**both)
        negative, positive = output.chunk(2)
        self._prepared = inputs, foreseen, (negative,)
        return (positive,)

    def _batched(self, inputs: Mapping[str, Any], foreseen: Mapping[str, Any]) -> list[str]:
        """The arguments to put into one batch."""
        tensors = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        unknown = [name for name in tensors if name not in (*_BATCHED, *_SHARED)]
        if unknown:
            raise NotImplementedError(
                f"guidance cannot be batched: {self._name} is called with a tensor {unknown[0]}; known are"
                f" {', '.join((*_BATCHED, *_SHARED))}"
            )
        for name in tensors:
            if foreseen[name].shape != inputs[name].shape:
                raise ValueError(
                    f"guidance cannot be batched: {name} is {tuple(inputs[name].shape)} with the prompt and"
                    f" {tuple(foreseen[name].shape)} with the negative prompt"
                )
        return [name for name in tensors if name in _BATCHED]
