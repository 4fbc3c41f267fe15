"""Scripts that nothing imports: the fuzzer finds planted bugs, recall tells models apart, the picture moves."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from PIL import Image

from vmonarch.eval.render import tables
from vmonarch.eval.studies import animation, fuzz, mqar
from vmonarch.eval.studies.mqar import Mixer, Network, Task, sequences
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.flash_bias import api as flash_bias
from vmonarch.kernels.flash_entropy import reference as flash_entropy
from vmonarch.pipelines.video_io import encode_video

PLAIN = {"device": "cpu", "configurations": None}
SMALL = Task(128, 32, (2, 4, 8), 64, (4, 8), steps=250, batch=32, rates=(1e-2,), width=64, tested=96)


def first_failure(numbers, ops=tuple(fuzz.OPS), implementation="torch"):
    outcomes = (fuzz.outcome_of(number, implementation, ops=ops, **PLAIN) for number in numbers)
    return next((outcome for outcome in outcomes if outcome["failure"]), None)


def test_plain_torch_is_as_precise_as_its_dtype():
    assert first_failure(range(37)) is None


@pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("op", ["window_attention", "flash_entropy_attention"])
def test_kernels_too(op):
    assert first_failure(range(2), [op], "triton") is None


def test_a_noisy_sum_errs_by_the_size_of_its_terms():
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(48)
    with fuzz.Noise(0.0, 0):
        errors = torch.cat([(signs * 3).sum()[None], (3 * signs)[None] @ torch.ones(96, 1).double()[:, 0]]).abs()
    assert (errors > 0).all() and (errors <= 288 * torch.finfo(torch.float32).eps).all()


def test_a_case_is_a_function_of_its_number_and_configurations_decide_what_is_compiled():
    for number in range(40):
        one, two = (fuzz.make_case(number) for _ in range(2))
        assert str(one) == str(two)
        assert all(torch.equal(x.nan_to_num(), two.tensors[name].nan_to_num()) for name, x in one.tensors.items())
    cases = [fuzz.make_case(number, configurations=7) for number in (3, 10, 17)]
    assert len({(case.op, case.dtype, case.forward_only, case.tensors["query"].shape[3]) for case in cases}) == 1
    assert len({case.tensors["query"].shape[1] for case in cases}) > 1


def ignore_strides(right):
    """Tensors are read as if they were contiguous."""
    return lambda x: right(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))


def round_products(right):
    """Products of float32 tensors in bfloat16, as under autocast."""
    return lambda x: right(x if x.dtype == torch.float64 else x.bfloat16())


def leave_the_last_row(right):
    """The last row of the result is never written; in most processes it would hold what was there before."""

    def wrong(query, *args, **options):
        out, lse = right(query, *args, **options)
        unwritten = torch.empty_like(out)
        unwritten[:, : max(1, out.shape[1] - 1)] = out[:, : max(1, out.shape[1] - 1)]
        return (out if query.dtype == torch.float64 else unwritten), lse

    return wrong


def lose_the_gradient(right):
    """No gradient reaches the key."""
    kept = lambda query, key: key if query.dtype == torch.float64 else key.detach()
    return lambda query, key, *args, **options: right(query, kept(query, key), *args, **options)


@pytest.mark.parametrize("plant", [ignore_strides, round_products, leave_the_last_row, lose_the_gradient])
def test_the_fuzzer_finds_a_planted_bug(monkeypatch, plant):
    if plant in (ignore_strides, round_products):
        monkeypatch.setattr("vmonarch.kernels.flash_bias.reference.to_groups", plant(flash_entropy.to_groups))
    else:
        name = "flash_bias_attention_reference"
        monkeypatch.setattr(flash_bias, name, plant(getattr(flash_bias, name)))
    assert first_failure(range(40), ["flash_bias_attention"]) is not None


def test_a_run_is_recorded(tmp_path):
    words = ["--ops", "window_attention", "--output", str(tmp_path / "fuzz.json")]
    assert fuzz.main(["--cases", "4", *words]) == 0
    record = json.loads((tmp_path / "fuzz.json").read_text())
    assert record["cases"] == record["by_op"]["window_attention"]["cases"] == 4 and not record["failed"]


def drawn(count=200, tokens=64, pairs=8):
    return sequences(count, tokens, pairs, 64, torch.Generator().manual_seed(0))


def test_every_key_is_asked_for_once_at_a_place_of_the_power_law():
    text, positions, values = drawn()
    for row, asked, answers in zip(text.tolist(), positions.tolist(), values.tolist(), strict=True):
        held = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(held) == len(set(held.values())) == 8
        assert all(0 < key < 32 <= value < 64 for key, value in held.items())
        assert {row[at]: answer for at, answer in zip(asked, answers, strict=True)} == held
        assert all(at >= 16 and at % 2 == 0 for at in asked)
        assert all(token == 0 for at, token in enumerate(row[16:], 16) if at not in asked)
    assert all(torch.equal(same, first) for same, first in zip(drawn(), drawn(), strict=True))
    _, positions, _ = drawn(20_000, 64, 1)
    shares = torch.bincount((positions.flatten() - 2) // 2, minlength=31) / 20_000
    law = torch.arange(1, 32) ** (mqar.POWER - 1.0)
    torch.testing.assert_close(shares, law / law.sum(), rtol=0, atol=0.015)
    _, positions, _ = drawn(4000, 64, 8)
    assert abs((positions[:, 0] < positions[:, 7]).float().mean().item() - 0.5) < 0.05


@pytest.mark.parametrize("name", mqar.MODELS)
def test_models_are_causal_and_all_that_they_hold_learns(name):
    text, positions, _ = drawn(2, 32, 2)
    small = Network([dataclasses.replace(mixer, size=min(mixer.size, 16)) for mixer in mqar.MODELS[name]], 64, 16)
    learnt = [parameter for parameter in small.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(small(text, positions).square().sum(), learnt)
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    everywhere = torch.arange(32).expand(2, 32)
    changed = text.clone()
    changed[:, 20:] = 3
    before, after = (small(tokens, everywhere) for tokens in (text, changed))
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert (before[:, 20:] - after[:, 20:]).abs().amax() > 1e-3


def test_the_state_is_that_of_the_paper_and_of_the_kernels():
    states = [mixer.state(128, 1024) for mixer in (Mixer("window", 16), Mixer("attention"), Mixer("linear", 16))]
    assert states == [2 * 128 * 16, 2 * 128 * 1024, (1 + 16 + 256) * 129]
    x = torch.ones(1, 3, 1, 16)
    _, state = mqar.taylor_attention(x, x, torch.ones(1, 3, 1, 128), causal=True, return_state=True)
    assert states[2] == state.kv.numel() + state.k.numel()


@pytest.mark.deep
def test_a_window_and_linear_attention_recall_together_and_neither_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(mqar, "Task", lambda steps: dataclasses.replace(SMALL, steps=steps))
    mqar.Task.steps = SMALL.steps
    names = ["Based, window 2, d'=8", "window 8", "linear d'=8"]
    monkeypatch.setitem(mqar.MODELS, "window 8", (Mixer("window", 4, rotary=True), Mixer("window", 4)))
    assert mqar.main(["--output", str(tmp_path / "mqar.json"), "--device", "cpu", "--models", *names]) == 0
    results = json.loads((tmp_path / "mqar.json").read_text())
    based, window, linear = (results["models"][name]["recall"] for name in names)
    assert min(based.values()) > 0.9
    # Any value of the sequence is right once in as many times as there are pairs.
    assert all(alone["4"] < 0.35 and alone["8"] < 0.2 for alone in (window, linear))
    assert tables.table_text(results).count("\n| ") == 4


@pytest.mark.parametrize("suffix", ["webp", "gif"])
def test_an_animation_has_all_frames_of_all_methods_side_by_side(tmp_path, suffix, capsys):
    files, output = {"full": "0001-full.mp4", "vmonarch": "0001-vmonarch.mp4"}, tmp_path / f"all.{suffix}"
    for shade, name in enumerate(files.values()):
        video = np.full((5, 32, 48, 3), 60 + 100 * shade, dtype=np.uint8)
        encode_video(tmp_path / name, video + np.arange(5, dtype=np.uint8)[:, None, None, None] * 15, 15)
    results = [{"method": method, "video": name} for method, name in files.items()]
    record = tmp_path / "evaluation.json"
    record.write_text(json.dumps({"items": [{"folder": ".", "results": results}]}))
    assert animation.main([str(tmp_path), "--output", str(output), "--width", "300"]) == 0
    with Image.open(output) as picture:
        assert picture.n_frames == 5 and picture.width == 300 and picture.info["loop"] == 0
        picture.seek(4)
        last = np.asarray(picture.convert("RGB"))
    left, right = last[last.shape[0] * 3 // 4, [75, 225], 0]
    assert abs(int(left) - 120) < 10 and abs(int(right) - 220) < 10
    record.unlink()
    with pytest.raises(SystemExit):
        animation.main([str(tmp_path), "--output", str(output)])
    assert "no finished comparison" in capsys.readouterr().err
