"""What the benchmarks refuse, each in one line that names the argument."""

import pytest

from vmonarch.cli import main

E2E = ["bench", "e2e", "--device", "cpu", "--output", "x.json"]
BIAS, PARALLEL = ["bench", "bias", "--device", "cpu"], ["bench", "parallel", "--device", "cpu"]
TRAIN = ["bench", "train", "--device", "cpu", "--model", "TINY", "--size", "32", "64", "--output", "x.json"]
USAGE = {
    "unknown setting": ([*E2E, "--settings", "1.3b-61x448x833"], ["--settings", "did you mean 1.3b-61x448x832?"]),
    "size without a model": ([*E2E, "--settings", "5x32x64"], ["--settings", "with --model"]),
    "model without sizes": ([*E2E, "--model", "wan2.1-14b"], ["--settings", "must be given with --model"]),
    "setting twice": ([*E2E, "--settings", "5b-93x704x1280", "5b-93x704x1280"], ["--settings", "different"]),
    "frames": ([*E2E, "--model", "wan2.1-1.3b", "--settings", "60x32x64"], ["--settings", "multiple of 4, got 60"]),
    "height": ([*E2E, "--model", "wan2.2-5b", "--settings", "5x48x64"], ["--settings", "multiple of 32, got 48"]),
    "unknown model": ([*E2E, "--model", "wan9", "--settings", "5x32x64"], ["--model", "hub id", "'wan9'"]),
    "unknown method": ([*E2E, "--methods", "vmonach"], ["--methods", "did you mean vmonarch"]),
    "method twice": ([*E2E, "--methods", "full", "full"], ["--methods", "different"]),
    "too many dense steps": ([*E2E, "--methods", "vmonarch:dense_steps=51"], ["--methods", "there are only 50 steps"]),
    "too many refreshes": ([*E2E, "--steps", "7", "--methods", "vmonarch:refresh=8"], ["--methods", "only 7 steps"]),
    "unknown mode": ([*E2E, "--modes", "fast"], ["--modes", "eager, compiled", "fast"]),
    "no rounds": ([*E2E, "--rounds", "0"], ["--rounds", "above 0"]),
    "no steps": ([*E2E, "--steps", "-1"], ["--steps", "above 0"]),
    "no budget": ([*E2E, "--budget", "0"], ["--budget", "above 0"]),
    "output is a folder": ([*E2E[:-1], "."], ["--output", "folder"]),
    "device": (["bench", "e2e", "--device", "tpu9"], ["--device", "cuda:N", "tpu9"]),
    "option of the other benchmark": ([*E2E, "--shapes", "2x4x4"], ["unrecognized arguments: --shapes 2x4x4"]),
    "the other way round": (["bench", "kernels", "--transformer-only"], ["unrecognized arguments: --transformer-only"]),
    "bias rounds": ([*BIAS, "--rounds", "0"], ["--rounds", "must be above 0"]),
    "bias cases": ([*BIAS, "--cases", "huge"], ["--cases 'huge' leaves none"]),
    "bias pattern": ([*BIAS, "--cases", "("], ["--cases must be a regular expression, got '('"]),
    "bias methods": ([*BIAS, "--methods", "flash-bais"], ["--methods must be of flash-bias, "]),
    "train frames": ([*TRAIN, "--frames", "60"], ["--frames must have frames 1 more than a multiple of 4, got 60"]),
    "train size": (
        [*TRAIN, "--size", "32", "60"], ["--frames must have a width that is a multiple of 16, got 60"]),
    "train without full": ([*TRAIN, "--methods", "vmonarch"], ["--methods must hold full"]),
    "train methods": ([*TRAIN, "--methods", "full", "sparse"], ["--methods must be one of"]),
    "train model": (
        [*TRAIN, "--model", "wan-nothing"], ["--model must be a YAML file or one of wan2.1-1.3b"]),
    "train rounds": ([*TRAIN, "--rounds", "0"], ["--rounds", "must be above 0, got 0"]),
    "train device": ([*TRAIN, "--device", "cuda:99"], ["device"]),
    "parallel cases": ([*PARALLEL, "--cases", "attention"], ["cases must be left out: whole models are timed"]),
    "parallel models": ([*PARALLEL, "--models", "14b"], ["settings must be of"]),
    "parallel modes": ([*PARALLEL, "--modes", "fast"], ["--modes must be of eager, compiled; got 'fast'"]),
    "parallel rounds": ([*PARALLEL, "--rounds", "0"], ["--rounds", "must be above 0"]),
    "parallel without 1": ([*PARALLEL, "--ranks", "2", "4"], ["--ranks must be different numbers, 1 among them"]),
    "parallel twice": ([*PARALLEL, "--ranks", "1", "1"], ["--ranks must be different numbers"]),
    "parallel zero": ([*PARALLEL, "--ranks", "0", "1"], ["--ranks must be different numbers"]),
    "parallel output": ([*PARALLEL, "--output", "."], ["output must be a file"]),
    "parallel device": (["bench", "parallel"], ["--device"]),
}  # fmt: skip


@pytest.mark.parametrize(("words", "fragments"), USAGE.values(), ids=USAGE)
def test_bad_arguments_are_named(words, fragments, tiny_yaml, tmp_path, monkeypatch, capsys):
    words = [tiny_yaml if word == "TINY" else word for word in words]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    message = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and message.startswith(f"vmonarch bench {words[1]}: error: ")
    for fragment in fragments:
        assert fragment in message, message
    assert not list(tmp_path.rglob("*.json"))
