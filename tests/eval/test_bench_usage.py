"""What the benchmarks and tuning refuse, each in one line that names the argument; nothing is left behind."""

import pytest
import torch

from vmonarch.cli import main

E2E = ["bench", "e2e", "--device", "cpu", "--output", "x.json"]
BIAS, PARALLEL = ["bench", "bias", "--device", "cpu"], ["bench", "parallel", "--device", "cpu"]
TRAIN = ["bench", "train", "--device", "cpu", "--model", "TINY", "--size", "32", "64", "--output", "x.json"]
TUNE = ["tune", "--device", "cpu", "--dtype", "float32", "--output", "x.json"]
USAGE = {
    "tune kernel": ([*TUNE, "--kernels", "r_stp"], ["--kernels must be of", "did you mean r_step?"]),
    "tune dtype": ([*TUNE, "--dtype", "bfloat16"], ["--dtype bfloat16 does not work in the interpreter"]),
    "tune the package's table": (TUNE[:-2], ["--output is needed with --device cpu"]),
    "unknown setting": ([*E2E, "--settings", "1.3b-61x448x833"], ["--settings", "did you mean 1.3b-61x448x832?"]),
    "model without sizes": ([*E2E, "--model", "wan2.1-14b"], ["--settings", "must be given with --model"]),
    "setting twice": ([*E2E, "--settings", "5b-93x704x1280", "5b-93x704x1280"], ["--settings", "different"]),
    "height": ([*E2E, "--model", "wan2.2-5b", "--settings", "5x48x64"], ["--settings", "multiple of 32, got 48"]),
    "unknown method": ([*E2E, "--methods", "vmonach"], ["--methods", "did you mean vmonarch"]),
    "too many dense steps": ([*E2E, "--methods", "vmonarch:dense_steps=51"], ["--methods", "there are only 50 steps"]),
    "unknown mode": ([*E2E, "--modes", "fast"], ["--modes", "eager, compiled", "fast"]),
    "no rounds": ([*E2E, "--rounds", "0"], ["--rounds", "above 0"]),
    "output is a folder": ([*E2E[:-1], "."], ["--output", "folder"]),
    "device": (["bench", "e2e", "--device", "tpu9"], ["--device", "cuda:N", "tpu9"]),
    "bias pattern": ([*BIAS, "--cases", "("], ["--cases must be a regular expression, got '('"]),
    "bias cases": ([*BIAS, "--cases", "huge"], ["--cases 'huge' leaves none of: gpt2-alibi R=2 forward; "]),
    "bias methods": ([*BIAS, "--methods", "flash-bais"], ["--methods must be of flash-bias, "]),
    "train frames": ([*TRAIN, "--frames", "60"], ["--frames must have frames 1 more than a multiple of 4, got 60"]),
    "train without full": ([*TRAIN, "--methods", "vmonarch"], ["--methods must hold full"]),
    "train model": (
        [*TRAIN, "--model", "wan-nothing"], ["--model must be a YAML file or one of wan2.1-1.3b"]),
    "parallel models": ([*PARALLEL, "--models", "14b"], ["settings must be of"]),
    "parallel without 1": ([*PARALLEL, "--ranks", "2", "4"], ["--ranks must be different numbers, 1 among them"]),
    "parallel output": ([*PARALLEL, "--output", "."], ["output must be a file"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "fragments"), USAGE.values(), ids=USAGE)
def test_bad_arguments_are_named(words, fragments, tiny_yaml, tmp_path, monkeypatch, capsys):
    words = [tiny_yaml if word == "TINY" else word for word in words]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    command = " ".join(words[: 1 + (words[0] == "bench")])
    captured = capsys.readouterr()
    message = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and message.startswith(f"vmonarch {command}: error: ")
    for fragment in fragments:
        assert fragment in message, message
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("command", [["bench", "kernels"], ["tune", "--dtype", "float32"]], ids=lambda words: words[0])
def test_speed_is_measured_on_a_gpu_without_the_interpreter(command, tmp_path, monkeypatch, capsys):
    def problem(*words):
        assert main([*command, *words]) == 2
        return capsys.readouterr().err

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device 'cuda' cannot be used: there is no CUDA device" in problem()
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "--device cpu needs TRITON_INTERPRET=1" in problem("--device", "cpu", "--output", "x.json")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert "TRITON_INTERPRET=1: unset it" in problem()
    assert "--device must be up to cuda:0" in problem("--device", "cuda:1")
    assert list(tmp_path.iterdir()) == []
