"""Bad input: an exit code, one line that names the argument and what is supported, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vmonarch.configs import InputError
from vmonarch.pipelines import loading
from vmonarch.pipelines.config import GenerateConfig

PROMPT = "a red circle moving right"

# Of each command: arguments after a prompt, and what the message must hold; each is a usage error (exit code 2). One
# case for each check: what all settings share, a type or a range, is shown with one of them.
GENERATE = {
    "override that is no yaml": (["steps=[1,"], ["--steps", "YAML"]),
    "override with hyphens": (["num-frames=5"], ["prompt", "'num-frames=5'", "write num_frames=5"]),
    "unknown key": (["step=3"], ["step", "no known key", "did you mean steps?"]),
    "unknown option": (["--stepz", "3"], ["--stepz", "did you mean --steps?"]),
    "option with an underscore": (["--num_frames=9"], ["--num_frames=9", "did you mean --num-frames?"]),
    "below the range": (["--steps", "0"], ["--steps", "in [1, 1000], got 0"]),
    "not finite": (["--guidance", "inf"], ["--guidance", "in [0, inf), got inf"]),
    "none of the choices": (["--offload", "disk"], ["--offload", "none, model, group"]),
    "height far too large": (["--height", str(16 * 10**22)], ["--height", "at most 1024 for this model"]),
    "too many frames": (["--num-frames", "257"], ["--num-frames", "at most 253 for this model"]),
    "frames not 4k+1": (["--num-frames", "10"], ["--num-frames", "4·k + 1", "9 or 13"]),
    "guidance_2 with one transformer": (["--guidance-2", "3"], ["--guidance-2", "two transformers"]),
    "10,000 characters": (["red circle " * 910], ["prompt", "at most 512 tokens", "1821"]),
    "prompt of a book": ([f"prompts=['{'a ' * 40_000}']"], ["prompt", "at most 65,536 characters, got 80,000"]),
    "long negative prompt": (["--negative-prompt", "red " * 600], ["--negative-prompt", "512 tokens", "601"]),
    "seed too large": (["--seed", str(2**63)], ["--seed", f"in [0, {2**63 - 1}]"]),
    "prompt among the seeds": (["--seed", "1", "a red circle"], ["--seed", "integers", "prompts go before --seed"]),
    "no seed": (["seeds=[]"], ["--seed", "one or more"]),
    "revision of a folder": (["--revision", "main"], ["--revision", "models of the hub"]),
    "frame that is not there": (
        ["--attention", "vmonarch:exact={rows: [99]}"],
        ["--attention", "exact does not fit", "frame 99", "3 latent frames"],
    ),
    "more dense steps than steps": (["attention.dense_steps=50"], ["--attention", "dense_steps=50", "only 2 steps"]),
    "dense layer that is not there": (["attention.dense_layers=[2]"], ["--attention", "dense_layers", "2 layers"]),
    "unknown attention": (["--attention", "vmonach"], ["--attention", "vmonarch-t1", "did you mean vmonarch?"]),
    "options for full": (["attention=full", "attention.coarse=2"], ["attention.coarse", "known: none"]),
    "missing model folder": (["--model", "./nowhere"], ["--model", "no folder", "embedded", "hub id"]),
    "model is a file": (["--model", "FILE"], ["--model", "is a file"]),
    "unknown device": (["--device", "tpu"], ["--device", "auto, cpu, cuda"]),
    "float16 on the CPU": (["--dtype", "float16", "--device", "cpu"], ["--dtype", "float32, bfloat16"]),
    "offload on the CPU": (["--offload", "model", "--device", "cpu"], ["--offload", "CUDA"]),
    "output path is a file": (["--output-dir", "FILE"], ["--output-dir", "is a file"]),
    "unwritable output": (["--output-dir", "/proc/outputs"], ["--output-dir", "cannot be written"]),
    "missing config": (["--config", "none.yaml"], ["--config", "YAML file or one of", "wan2.1-t2v-1.3b"]),
    "config is no mapping": (["--config", "LIST"], ["--config", "mapping"]),
    "empty prompt file": (["--prompt-file", "EMPTY"], ["--prompt-file", "at least one prompt"]),
    "prompt file not utf-8": (["--prompt-file", "LATIN"], ["--prompt-file", "UTF-8"]),
    "image for a text model": (["--image", "FILE"], ["--image", "text-to-video"]),
    "no LoRA file": (["--lora", "nowhere.safetensors"], ["--lora", "no file"]),
    "scale of LoRA layers": (["--lora", ".:nan"], ["--lora", "PATH:SCALE"]),
    "LoRA file of text": (["--lora", "FILE"], ["--lora", "cannot be read"]),
    "lora_2 with one transformer": (["--lora-2", "FILE"], ["--lora-2", "two transformers"]),
    "sigmas alone": (["--sigmas", "1,0.5"], ["--sigmas", "needs scheduler"]),
    "sigmas that rise": (["--scheduler", "lcm", "--sigmas", "0.5,1"], ["--sigmas", "fall"]),
    "a sigma of 0": (["--scheduler", "lcm", "--sigmas", "1,0"], ["--sigmas", "in [1e-6, 1]"]),
    "more sigmas than steps": (["--scheduler", "lcm", "--sigmas", "1,0.7,0.5"], ["--sigmas", "2, as many as steps"]),
    "incomplete record": (["--from-json", "PARTIAL"], ["--from-json", "incomplete"]),
    "record of something else": (["--from-json", "OTHER"], ["--from-json", "no record of a generated video"]),
}

COMPARE = {
    "method twice": (["--methods", "vmonarch", "vmonarch"], ["--methods", "must differ", "vmonarch"]),
    "no strip": (["--strip-frames", "0"], ["--strip-frames must be in [1, inf), got 0"]),
    "attention is generate's": (["attention=full"], ["attention", "no known key", "methods"]),
}

# Of the others: all arguments.
EVAL = {
    "prompt twice": (["a red", "a red"], ["must differ"]),
    "baseline": (["a red", "--baseline", "vmonarch-t9"], ["--baseline must be one of full, vmonarch"]),
    "prompt set": (["--prompt-set", "movies"], ["--prompt-set must be one of embedded"]),
    "more prompts than there are": (["--prompt-set", "embedded", "--num-prompts", "1000"], ["at most 64"]),
    "vbench": (["a red", "--vbench", "imaging"], ["did you mean imaging_quality?"]),
    "report": (["a red", "--report-items", "-1"], ["--report-items must be in [0, inf), got -1"]),
}

CALIBRATE = {
    "both budgets": (["p", "--time", "1", "--flops", "1"], ["flops and time exclude each other"]),
    "time without the default": (["p", "--candidates", "vmonarch-t1", "--time", "1"], ["time is relative to VMonarch"]),
    "refining without gradients": (["p", "--refine", "2", "--no-sensitivity"], ["refine", "leave out no-sensitivity"]),
    "another processor": (["p", "--candidates", "full"], ["candidates must be of the processors vmonarch or"]),
    "dense": (["p", "--candidates", "vmonarch:dense_steps=1"], ["must leave dense_steps alone"]),
    "less work than the cheapest": (["p", "--flops", "0.01"], ["--flops must be at least 0."]),
    "unknown measure": (["p", "--measure", "klo"], ["--measure must be one of error, layer_error", "got 'klo'"]),
    "measure that is left out": (["p", "--measure", "output_error", "--no-sensitivity"], ["without sensitivity"]),
    "plan alone": (["p", "--plan", "x.json"], ["plan is for --diagnosis"]),
}

ON_CPU = ["--device", "cpu", "--output", "x.json"]
KERNELS, E2E, FAMILIES, PARALLEL = ([name, *ON_CPU] for name in ("kernels", "e2e", "families", "parallel"))
TRAIN = ["train", *ON_CPU, "--model", "TINY", "--size", "32", "64"]
BENCH = {
    "unknown shape": ([*KERNELS, "--shapes", "43x28"], ["--shapes", "43x28x52", "'43x28'"]),
    "output under a file": ([*KERNELS, "--output", "FILE/x.json"], ["--output", "cannot be written"]),
    "something else to bench": (["everything"], ["kernels", "everything"]),
    "unknown setting": ([*E2E, "--settings", "1.3b-61x448x833"], ["--settings", "did you mean 1.3b-61x448x832?"]),
    "model without sizes": ([*E2E, "--model", "wan2.1-14b"], ["--settings", "must be given with --model"]),
    "unknown method": ([*E2E, "--methods", "vmonach"], ["--methods", "did you mean vmonarch"]),
    "too many dense steps": ([*E2E, "--methods", "vmonarch:dense_steps=51"], ["--methods", "there are only 50 steps"]),
    "unknown mode": ([*E2E, "--modes", "fast"], ["--modes", "eager, compiled", "fast"]),
    "pattern of cases": ([*FAMILIES, "--cases", "("], ["--cases must be a regular expression, got '('"]),
    "train frames": ([*TRAIN, "--frames", "60"], ["--frames must have frames 1 more than a multiple of 4, got 60"]),
    "train without full": ([*TRAIN, "--methods", "vmonarch"], ["--methods must hold full"]),
    "parallel without 1": ([*PARALLEL, "--ranks", "2", "4"], ["--ranks must be different numbers, 1 among them"]),
}

TUNE = {
    "kernel": ([*ON_CPU, "--kernels", "r_stp"], ["--kernels must be of", "did you mean r_step?"]),
    "dtype": ([*ON_CPU, "--dtype", "bfloat16"], ["--dtype bfloat16 does not work in the interpreter"]),
    "the package's table": (ON_CPU[:2], ["--output is needed with --device cpu"]),
}

CASES = {
    f"{command}: {name}": (command, [*before, *words], fragments)
    for command, before, table in (
        ("generate", [PROMPT], GENERATE),
        ("compare", [PROMPT], COMPARE),
        ("eval", [], EVAL),
        ("calibrate", [], CALIBRATE),
        ("bench", [], BENCH),
        ("tune", [], TUNE),
    )
    for name, (words, fragments) in table.items()
}


@pytest.fixture
def files(cli) -> dict[str, str]:
    """Files that the cases name in capitals."""
    contents = {
        "FILE": b"not a folder",
        "LIST": b"- steps\n",
        "EMPTY": b"\n  \n",
        "TINY": b"num_layers: 1\n",
        "LATIN": "ein rötlicher Kreis".encode("latin-1"),
        "OTHER": b'{"steps": 3}',
        "PARTIAL": json.dumps({"format": "vmonarch-generate-1", "config": {}}).encode(),
    }
    for name, data in contents.items():
        (cli.folder / name).write_bytes(data)
    return {name: str(cli.folder / name) for name in contents}


def assert_refused(result: tuple[int, str, str], code: int, fragments: list[str]) -> None:
    got, out, err = result
    assert got == code, err
    message = err.strip().splitlines()[-1]
    assert message.startswith("vmonarch ") and ": error: " in message and "Traceback" not in err
    for fragment in fragments:
        assert fragment in message, message
    assert out == ""


@pytest.mark.parametrize(("command", "words", "fragments"), CASES.values(), ids=CASES)
def test_usage_errors(
    cli, files: dict[str, str], command: str, words: list[str], fragments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "calibrate":
        # The layers and heads to record are the model's.
        monkeypatch.setattr("vmonarch.eval.calibrate.run.sample", lambda *_, **__: pytest.fail("something was sampled"))
    else:
        monkeypatch.setattr(loading, "read_pipeline", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    line = [word.replace(word.split("/")[0], files.get(word.split("/")[0], word.split("/")[0])) for word in words]
    result = cli(command, *line, tiny=command not in ("bench", "tune"))
    assert_refused(result, 2, fragments)
    assert result[2].splitlines()[-1].startswith(f"vmonarch {command}")
    assert sorted(files) == sorted(path.name for path in cli.folder.rglob("*") if path.is_file())
    assert cli.outputs(f"outputs/{command}") == []
    assert command != "eval" or not (cli.folder / "outputs").exists()


def test_prompts_that_are_missing_or_without_quotes(cli) -> None:
    sources = {"generate": "--from-json", "compare": "--prompt-file", "eval": "--prompt-set", "calibrate": "--prompt-f"}
    for command, source in sources.items():
        assert_refused(cli(command), 2, ["prompt", "missing", "--prompt-file", source])
        words = PROMPT.split()
        assert_refused(cli(command, *words), 2, ["prompt", "must stand in quotes", "'a red circle moving right'"])
    # Scripts without blanks between words: two prompts.
    assert_refused(cli("generate", "一只猫", "一只狗", "--steps", 0), 2, ["--steps"])


@pytest.mark.parametrize("command", ["generate", "compare", "eval", "calibrate"])
def test_kernels_on_the_cpu(cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(loading, "read_pipeline", lambda *_, **__: pytest.fail("a model was loaded"))
    option = {"generate": "--attention", "calibrate": "--candidates"}.get(command, "--methods")
    line = [command, PROMPT, option, "vmonarch:implementation=triton", "--device", "cpu"]
    assert_refused(cli(*line), 2, [option, "implementation=triton", "on the CPU", "auto and torch are"])


def test_devices_that_are_not_there(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(cli("generate", PROMPT, "--device", "cuda"), 2, ["--device", "no CUDA device", "auto or cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert_refused(cli("generate", PROMPT, "--device", "cuda:2"), 2, ["--device", "cuda:0 to cuda:1"])


def test_image_to_video_without_image(cli, tiny_image_model: Path, files: dict[str, str]) -> None:
    assert_refused(cli("generate", PROMPT, model=tiny_image_model), 2, ["--image", "needed"])
    for image in (files["FILE"], "nowhere.png", "."):
        line = ["generate", PROMPT, "--image", image]
        assert_refused(cli(*line, model=tiny_image_model), 2, ["--image", "picture file"])


def edit_json(path: Path, **changes: object) -> None:
    contents = json.loads(path.read_text())
    contents.update(changes)
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def weights(model: Path, component: str) -> Path:
    return next((model / component).glob("*.safetensors"))


def edit_weights(model: Path, component: str, *, without: str = "", extra: str | None = None) -> None:
    """Take a tensor of a component's weights out, or put one in."""
    path = weights(model, component)
    tensors = load_file(path)
    tensors.pop(without, None)
    save_file(tensors if extra is None else tensors | {extra: torch.zeros(1)}, path, {"format": "pt"})


# Damage to a model folder, and what the message must hold; each is an error of the run (exit code 1).
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no index": (lambda m: (m / "model_index.json").unlink(), ["model_index.json", "diffusers pipeline"]),
    "other pipeline": (
        lambda m: edit_json(m / "model_index.json", _class_name="FluxPipeline"),
        ["FluxPipeline", "WanPipeline, WanImageToVideoPipeline, HunyuanVideoPipeline"],
    ),
    "index without vae": (lambda m: edit_json(m / "model_index.json", vae=None), ["no vae"]),
    "missing component": (lambda m: shutil.rmtree(m / "vae"), ["no folder vae/"]),
    "missing weights": (lambda m: weights(m, "transformer").unlink(), ["transformer", "no weights", "safetensors"]),
    "pickled weights": (
        lambda m: weights(m, "transformer").rename(m / "transformer/diffusion_pytorch_model.bin"),
        ["transformer", "pickled ones are not"],
    ),
    "truncated weights": (
        lambda m: truncate(weights(m, "transformer"), 0.9),
        ["safetensors", "damaged", "header"],
    ),
    "missing shard": (
        lambda m: (m / "vae/diffusion_pytorch_model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": {"a": "model-00001-of-00002.safetensors"}})
        ),
        ["weights are missing", "model-00001-of-00002.safetensors"],
    ),
    "missing tokenizer": (lambda m: (m / "tokenizer/tokenizer.json").unlink(), ["tokenizer", "cannot be loaded"]),
    "weights of another shape": (lambda m: edit_json(m / "transformer/config.json", ffn_dim=48), ["cannot be loaded"]),
    "text encoder without a tensor": (
        lambda m: edit_weights(m, "text_encoder", without="encoder.block.0.layer.0.SelfAttention.q.weight"),
        ["text_encoder cannot be used", "lack 1 of the tensors", "encoder.block.0.layer.0.SelfAttention.q.weight"],
    ),
    "vae with another tensor": (
        lambda m: edit_weights(m, "vae", extra="decoder.conv_in.gain"),
        ["vae cannot be used", "hold 1 tensors", "AutoencoderKLWan", "decoder.conv_in.gain"],
    ),
    "config of fewer layers": (
        lambda m: edit_json(m / "transformer/config.json", num_layers=1),
        ["transformer cannot be used", "hold", "blocks.1.attn1.norm_k.weight", "more"],
    ),
}


@pytest.mark.parametrize(("damage", "fragments"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_models(cli, broken_model: Path, damage: Callable[[Path], object], fragments: list[str]) -> None:
    damage(broken_model)
    assert_refused(cli("generate", PROMPT, model=broken_model), 1, [str(broken_model), *fragments])
    assert cli.outputs() == []


def test_a_hub_that_cannot_be_reached(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert_refused(cli("generate", PROMPT, model="owner/name"), 1, ["owner/name", "folder", "hub", "no route to host"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompts": "a text"}, "prompts must be a list, each text"),
        ({"prompts": ("\ud800",)}, "prompts must be Unicode"),
        ({"negative_prompt": "a\0b"}, "negative_prompt must not be empty, nor hold NUL"),
        ({"seeds": (True,)}, "seeds must be a list, each an integer"),
        ({"height": 32.0}, "height must be an integer or null"),
        ({"attention": 3}, "attention must be a method's name"),
        ({"attention": {"num_iterations": 3}}, "attention must be one of"),
    ],
    ids=str,
)
def test_library_errors_name_the_field(values: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        GenerateConfig(**{"prompts": (PROMPT,), **values})
