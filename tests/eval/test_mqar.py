"""Recall by state: the task is the paper's, models differ by their mixers alone, the record is what was found."""

import dataclasses
import json

import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.eval.studies import mqar
from vmonarch.eval.studies.mqar import Mixer, Model, Network, Settings, sequences

CPU = torch.device("cpu")
TINY = Settings(64, 32, (2, 4), 64, (4, 8), steps=2, batch=4, rates=(1e-3, 1e-2))


def drawn(count=200, tokens=64, pairs=8, vocabulary=64, seed=0):
    return sequences(count, tokens, pairs, vocabulary, torch.Generator().manual_seed(seed))


def network(mixers, settings=TINY, width=16):
    return Network(Model("", "", mixers, width), len(settings.rates), settings, "torch", torch.float32)


def test_every_family_has_a_style_and_every_model_a_name():
    models = mqar.standard_models()
    assert {model.family for model in models} == set(mqar._STYLES)
    assert len({model.name for model in models}) == len(models)


def test_every_key_is_asked_for_once_and_its_answer_is_its_value():
    text, positions, values = drawn()
    assert text.shape == (200, 64) and positions.shape == values.shape == (200, 8)
    for row, asked, answers in zip(text.tolist(), positions.tolist(), values.tolist(), strict=True):
        held = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(held) == len(set(held.values())) == 8
        assert all(0 < key < 32 <= value < 64 for key, value in held.items())
        assert {row[at]: answer for at, answer in zip(asked, answers, strict=True)} == held
        assert all(at >= 16 and at % 2 == 0 for at in asked)
        assert all(token == 0 for at, token in enumerate(row[16:], 16) if at not in asked)


def test_the_sequences_follow_from_the_seed_alone():
    for same, other, first in zip(drawn(), drawn(seed=1), drawn(), strict=True):
        assert torch.equal(same, first) and not torch.equal(other, first)


def test_queries_are_placed_by_the_power_law_in_no_order():
    _, positions, _ = drawn(20_000, 64, 1)
    shares = torch.bincount((positions.flatten() - 2) // 2, minlength=31) / 20_000
    law = torch.arange(1, 32) ** (mqar.POWER - 1.0)
    torch.testing.assert_close(shares, law / law.sum(), rtol=0, atol=0.015)
    _, positions, _ = drawn(4000, 64, 8)
    assert abs((positions[:, 0] < positions[:, 7]).float().mean().item() - 0.5) < 0.05


def test_rotary_scores_depend_on_the_distance_alone():
    q, k = (torch.randn(16, generator=torch.Generator().manual_seed(s)).expand(1, 9, 1, 16) for s in (0, 1))
    scores = (mqar.rotate(q)[0, :, 0] @ mqar.rotate(k)[0, :, 0].T).double()
    for distance in (-3, 0, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert (scores.diagonal(1)[0] - scores.diagonal(2)[0]).abs() > 0.05


@pytest.mark.parametrize("model", mqar.standard_models(), ids=lambda model: model.name)
def test_models_are_causal_and_all_that_they_hold_learns(model):
    text, positions, _ = drawn(2, 32, 2)
    small = network(tuple(dataclasses.replace(m, size=min(m.size, 16)) for m in model.mixers))
    logits = small(text, positions)
    assert logits.shape == (2, 4, 64)
    gradients = torch.autograd.grad(logits.square().sum(), list(small.parameters()))
    assert all(gradient.abs().amax(tuple(range(1, gradient.ndim))).min() > 0 for gradient in gradients)
    everywhere = torch.arange(32).expand(2, 32)
    changed = text.clone()
    changed[:, 20:] = 3
    before, after = (small(tokens, everywhere).view(2, 2, 32, 64) for tokens in (text, changed))
    torch.testing.assert_close(before[:, :, :20], after[:, :, :20])
    assert (before[:, :, 20:] - after[:, :, 20:]).abs().amax() > 1e-3


def test_rotary_layers_begin_by_looking_at_the_token_before():
    first = network((Mixer("attention", rotary=True), Mixer("attention")), width=64)
    q, k = first.biases["0"][0, :, :128].detach().expand(32, 128).view(1, 32, 1, 128).chunk(2, -1)
    scores = mqar.rotate(q)[0, :, 0] @ mqar.rotate(k)[0, :, 0].T / 8
    assert scores[20, :21].argmax() == 19 and scores[20, 19] > scores[20, :19].max() + 0.5
    assert "1" not in first.biases


def test_copies_are_models_of_their_own():
    both = Model("", "", (Mixer("window", 4, rotary=True), Mixer("linear", 4)), 16)
    slow, fast = (Network(both, 1, TINY, "torch", torch.float32) for _ in range(2))
    together = Network(both, 2, TINY, "torch", torch.float32)
    losses = [
        mqar.train(slow, dataclasses.replace(TINY, rates=(1e-3,)), CPU)[0],
        mqar.train(fast, dataclasses.replace(TINY, rates=(1e-2,)), CPU)[0],
    ]
    torch.testing.assert_close(mqar.train(together, TINY, CPU), losses)
    for one, other, stacked in zip(slow.parameters(), fast.parameters(), together.parameters(), strict=True):
        # The first steps of Adam divide gradients by themselves: tiny ones may come out a little different.
        torch.testing.assert_close(torch.cat([one, other]), stacked, rtol=1e-3, atol=1e-3)
        assert (one - other).abs().max() > 1e-3


def test_the_state_is_that_of_the_paper_and_of_the_kernels():
    window, attention = Mixer("window", 16), Mixer("attention")
    assert window.state(128, 1024) == 2 * 128 * 16 and window.state(128, 8) == 2 * 128 * 8
    assert attention.state(128, 1024) == 2 * 128 * 1024
    assert Mixer("linear", 16).state(128, 1024) == (1 + 16 + 256) * 129
    assert Mixer("linear", 64, "relu").state(128, 1024) == 64 * 129
    x = torch.ones(1, 3, 1, 16)
    _, state = mqar.taylor_attention(x, x, torch.ones(1, 3, 1, 128), causal=True, return_state=True)
    assert Mixer("linear", 16).state(128, 1024) == state.kv.numel() + state.k.numel()
    assert Model("", "", (window, attention), 128).state(1024) == 2 * 128 * (16 + 1024)


@pytest.mark.slow
def test_a_window_and_linear_attention_recall_together_and_neither_alone(monkeypatch):
    # As many answers tell 0.99 from 0.9.
    monkeypatch.setattr(mqar, "TEST_QUERIES", 512)
    settings = Settings(128, 32, (2, 4, 8), 64, (4, 8), steps=250, batch=32, rates=(1e-2,))
    window, linear = Mixer("window", 2), Mixer("linear", 8)
    found = {}
    for name, mixers in {
        "Based": (window, linear),
        "window": (Mixer("window", 4, rotary=True), Mixer("window", 4)),
        "linear": (linear, linear),
    }.items():
        record = mqar.measure(Model("", name, mixers, 64), settings, CPU, "torch", torch.float32)
        found[name] = record["recall"]["64"]
    assert min(found["Based"].values()) > 0.9
    # Any value of the sequence is right once in as many times as there are pairs.
    for alone in ("window", "linear"):
        assert found[alone]["4"] < 0.35 and found[alone]["8"] < 0.2


def run(tmp_path, *arguments):
    paths = ["--output", str(tmp_path / "record.json"), "--picture", str(tmp_path / "picture.png")]
    small = [
        *("--vocabulary", "64", "--tokens", "32", "--pairs", "2", "4", "--test-tokens", "64", "--test-pairs", "4", "8"),
        *("--steps", "2", "--batch", "4", "--rates", "0.001", "0.01", "--device", "cpu"),
    ]
    return mqar.main([*small, *paths, *arguments])


def test_the_record_the_picture_and_the_table_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(mqar, "TEST_QUERIES", 8)
    names = ["attention", "linear d'=8", "Based, window 2, d'=8"]
    assert run(tmp_path, "--models", *names) == 0
    results = json.loads((tmp_path / "record.json").read_text())
    assert [row["name"] for row in results["models"]] == ["attention", "Based, window 2, d'=8", "linear d'=8"]
    assert results["left_out"] == [] and results["settings"]["pairs"] == [2, 4]
    assert str(tmp_path) not in results["command"]
    for row in results["models"]:
        assert set(row["recall"]) == {"32", "64"} and set(row["recall"]["64"]) == {"4", "8"}
        assert row["learning_rate"] in (1e-3, 1e-2) and row["loss"] > 0 and row["parameters"] > 64 * 128
        best = max(entry["recall"] for entry in row["learning_rates"])
        assert sum(row["recall"]["32"].values()) / 2 == pytest.approx(best)
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    results["models"][1]["recall"]["64"]["8"] = 0.4321
    results["left_out"] = ["window 512"]
    table = mqar.mqar_table(results)
    assert "| 43.2 |" in table and "Left out for time: window 512." in table


def test_models_beyond_the_budget_are_left_out_and_named(tmp_path):
    assert run(tmp_path, "--models", "attention", "--budget", "-1") == 0
    results = json.loads((tmp_path / "record.json").read_text())
    assert results["models"] == [] and results["left_out"] == ["attention"]


def test_a_model_that_fails_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(mqar, "TEST_QUERIES", 8)
    one, *_, other = mqar.standard_models()
    refused = dataclasses.replace(other, name="refused", mixers=(Mixer("linear", 6), Mixer("linear", 33)))
    monkeypatch.setattr(mqar, "standard_models", lambda: [refused, one])
    assert run(tmp_path, "--models", "refused", one.name, "--implementation", "triton") == 1
    results = json.loads((tmp_path / "record.json").read_text())
    assert [row["name"] for row in results["models"]] == [one.name]
    assert results["failed"][0]["name"] == "refused" and "NotImplementedError" in results["failed"][0]["problem"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--pairs", "9"), "pairs must be up to 8 with 32 tokens of 64, got 9"),
        (("--test-pairs", "17"), "test_pairs must be up to 16"),
        (("--steps", "0"), "steps must be above 0, got 0"),
        (("--models", "Basde"), "did you mean Based"),
        (("--device", "tpu"), "device must be cpu, cuda or cuda:N"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_bad_arguments_are_named(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        run(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())
