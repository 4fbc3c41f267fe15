"""Bad input: an exit code, one line that names the argument and what is supported, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vmonarch.configs import FOLDER
from vmonarch.pipelines import loading

PROMPT = "a red circle moving right"

# Of each command: arguments after a prompt, and what the message must hold; each is a usage error (exit code 2). One
# case for each check: what all settings share, a type or a range, is shown with one of them.
GENERATE = {
    "override that is no yaml": (["steps=[1,"], ["--steps", "YAML"]),
    "override with hyphens": (["num-frames=10"], ["--num-frames", "4·k + 1"]),
    "unknown key": (["step=3"], ["step", "no known key", "did you mean steps?"]),
    "unknown option": (["--stepz", "3"], ["--stepz", "did you mean --steps?"]),
    "below the range": (["--steps", "0"], ["--steps", "in [1, 1000], got 0"]),
    "none of the choices": (["--offload", "disk"], ["--offload", "none, model, group"]),
    "frames not 4k+1": (["--num-frames", "10"], ["--num-frames", "4·k + 1", "9 or 13"]),
    "10,000 characters": (["red circle " * 910], ["prompt", "at most 512 tokens", "1821"]),
    "prompt among the seeds": (["--seed", "1", "a red circle"], ["--seed", "each an integer", "a red circle"]),
    "frame that is not there": (
        ["--attention", "vmonarch:exact={rows: [99]}"],
        ["--attention", "exact does not fit", "frame 99", "3 latent frames"],
    ),
    "more dense steps than steps": (["attention.dense_steps=50"], ["--attention", "dense_steps=50", "only 2 steps"]),
    "unknown attention": (["--attention", "vmonach"], ["--attention", "vmonarch-t1", "did you mean vmonarch?"]),
    "missing model folder": (["--model", "./nowhere"], ["--model", "no folder", "embedded", "hub id"]),
    "unknown device": (["--device", "tpu"], ["--device", "auto, cpu, cuda"]),
    "float16 on the CPU": (["--dtype", "float16", "--device", "cpu"], ["--dtype", "float32, bfloat16"]),
    "unwritable output": (["--output-dir", "/proc/outputs"], ["--output-dir", "cannot be written"]),
    "missing config": (["--config", "none.yaml"], ["--config", "YAML file or one of", "wan2.1-t2v-1.3b"]),
    "empty prompt file": (["--prompt-file", "EMPTY"], ["--prompt-file", "at least one prompt"]),
    "image for a text model": (["--image", "FILE"], ["--image", "text-to-video"]),
    "no LoRA file": (["--lora", "nowhere.safetensors"], ["--lora", "no file"]),
    "LoRA without a path": (["--lora", ":0.8"], ["--lora", "PATH is missing"]),
    "sigmas alone": (["--sigmas", "1,0.5"], ["--sigmas", "needs scheduler"]),
    "incomplete record": (["--from-json", "PARTIAL"], ["--from-json", "incomplete"]),
}

COMPARE = {
    "method twice": (["--methods", "vmonarch", "vmonarch"], ["--methods", "must differ", "vmonarch"]),
}

# Of the others: all arguments.
EVAL = {
    "prompt twice": (["a red", "a red"], ["must differ"]),
    "file of presets": (["--config", str(FOLDER / "eval.yaml")], ["--config", "holds presets", "exact, figure12, "]),
    "prompt set": (["--prompt-set", "movies"], ["--prompt-set must be one of embedded"]),
    "vbench": (["a red", "--vbench", "imaging"], ["did you mean imaging_quality?"]),
    "small frames": (["a red", "--vmaf", "--height", "16", "--width", "64"], ["--vmaf needs frames", "got 64×16"]),
}

CALIBRATE = {
    "both budgets": (["p", "--time", "1", "--flops", "1"], ["flops and time exclude each other"]),
    "refining without gradients": (["p", "--refine", "2", "--no-sensitivity"], ["refine", "leave out no-sensitivity"]),
    "unknown measure": (["p", "--measure", "klo"], ["--measure must be one of error, layer_error", "got 'klo'"]),
    "plan alone": (["p", "--plan", "x.json"], ["plan is for --diagnosis"]),
}

ON_CPU = ["--device", "cpu", "--output", "x.json"]
KERNELS, E2E, PARALLEL = ([name, *ON_CPU] for name in ("kernels", "e2e", "parallel"))
TRAIN = ["train", *ON_CPU, "--model", "TINY", "--size", "32", "64"]
BENCH = {
    "unknown shape": ([*KERNELS, "--shapes", "43x28"], ["--shapes", "43x28x52", "'43x28'"]),
    "unknown setting": ([*E2E, "--settings", "1.3b-61x448x833"], ["--settings", "did you mean 1.3b-61x448x832?"]),
    "unknown method": ([*E2E, "--methods", "vmonach"], ["--methods", "did you mean vmonarch"]),
    "unknown command": (["kernls"], ["COMMAND", "did you mean kernels?"]),
    "no round": ([*KERNELS, "--rounds", "0"], ["--rounds must be above 0, got 0"]),
    "residuals are not trained": ([*TRAIN, "--methods", "full", "fast"], ["residuals of 'fast' have no gradient"]),
    "modes of two kinds": ([*PARALLEL, "--modes", "eager", "training"], ["--modes must be training alone, or of"]),
    "train frames": ([*TRAIN, "--frames", "60"], ["--frames must have frames 1 more than a multiple of 4, got 60"]),
}

TUNE = {
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
        "EMPTY": b"\n  \n",
        "TINY": b"num_layers: 1\n",
        "PARTIAL": json.dumps({"format": "vmonarch-generate-2", "config": {}}).encode(),
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
    for command in ("generate", "compare", "eval", "calibrate"):
        assert_refused(cli(command), 2, ["prompt", "missing", "--prompt-file"])
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


def test_image_to_video_without_image(cli, folders, files: dict[str, str]) -> None:
    model = folders("i2v-2.1")
    assert_refused(cli("generate", PROMPT, model=model), 2, ["--image", "needed"])
    for image in (files["FILE"], "nowhere.png", "."):
        line = ["generate", PROMPT, "--image", image]
        assert_refused(cli(*line, model=model), 2, ["--image", "picture file"])


def edit_json(path: Path, **changes: object) -> None:
    contents = json.loads(path.read_text())
    contents.update(changes)
    path.write_text(json.dumps({key: value for key, value in contents.items() if value is not None}))


def truncate(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def weights(model: Path, component: str) -> Path:
    return next((model / component).glob("*.safetensors"))


def drop_tensor(model: Path, component: str, name: str) -> None:
    path = weights(model, component)
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, {"format": "pt"})


# Damage to a model folder, and what the message must hold; each is an error of the run (exit code 1).
DAMAGE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no index": (lambda m: (m / "model_index.json").unlink(), ["model_index.json", "diffusers pipeline"]),
    "other pipeline": (
        lambda m: edit_json(m / "model_index.json", _class_name="FluxPipeline"),
        ["FluxPipeline", "WanPipeline, WanImageToVideoPipeline, HunyuanVideoPipeline"],
    ),
    "index without a component": (lambda m: edit_json(m / "model_index.json", vae=None), ["names no vae"]),
    "other transformer": (
        lambda m: edit_json(m / "model_index.json", transformer=["diffusers", "AutoencoderKLWan"]),
        ["transformer cannot be used", "AutoencoderKLWan, no transformer"],
    ),
    "missing component": (lambda m: shutil.rmtree(m / "vae"), ["no folder vae/"]),
    "missing weights": (lambda m: weights(m, "transformer").unlink(), ["transformer", "no weights", "safetensors"]),
    "truncated weights": (
        lambda m: truncate(weights(m, "transformer"), 0.9),
        ["safetensors", "cannot be loaded"],
    ),
    "text encoder without a tensor": (
        lambda m: drop_tensor(m, "text_encoder", "encoder.block.0.layer.0.SelfAttention.q.weight"),
        ["text_encoder cannot be used", "lack 1 of the tensors", "encoder.block.0.layer.0.SelfAttention.q.weight"],
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
