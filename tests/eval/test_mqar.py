"""Recall by state: the task is the paper's, models differ by their mixers alone."""

import dataclasses
import json

import pytest
import torch

from vmonarch.eval.render import tables
from vmonarch.eval.studies import mqar
from vmonarch.eval.studies.mqar import Mixer, Network, Task, sequences

SMALL = Task(128, 32, (2, 4, 8), 64, (4, 8), steps=250, batch=32, rates=(1e-2,), width=64, tested=96)


def drawn(count=200, tokens=64, pairs=8, vocabulary=64, seed=0):
    return sequences(count, tokens, pairs, vocabulary, torch.Generator().manual_seed(seed))


def test_every_key_is_asked_for_once_and_its_answer_is_its_value():
    text, positions, values = drawn()
    for row, asked, answers in zip(text.tolist(), positions.tolist(), values.tolist(), strict=True):
        held = dict(zip(row[0:16:2], row[1:16:2], strict=True))
        assert len(held) == len(set(held.values())) == 8
        assert all(0 < key < 32 <= value < 64 for key, value in held.items())
        assert {row[at]: answer for at, answer in zip(asked, answers, strict=True)} == held
        assert all(at >= 16 and at % 2 == 0 for at in asked)
        assert all(token == 0 for at, token in enumerate(row[16:], 16) if at not in asked)
    assert all(torch.equal(same, first) for same, first in zip(drawn(), drawn(), strict=True))


def test_queries_are_placed_by_the_power_law_in_no_order():
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
    assert (
        Mixer("window", 16).state(128, 1024) == 2 * 128 * 16 and Mixer("attention").state(128, 1024) == 2 * 128 * 1024
    )
    x = torch.ones(1, 3, 1, 16)
    _, state = mqar.taylor_attention(x, x, torch.ones(1, 3, 1, 128), causal=True, return_state=True)
    assert Mixer("linear", 16).state(128, 1024) == (1 + 16 + 256) * 129 == state.kv.numel() + state.k.numel()


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
