"""The study of joint attention: the model behind Wan's arguments, the weights of the video, what is noted of them."""

import pytest
import torch

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor
from vmonarch.eval.studies import joint
from vmonarch.finetune.embedded.text import TEXT_DIM, TRAIN_TOKENS
from vmonarch.finetune.embedded.transformer import velocity
from vmonarch.grid import LatentGrid

GRID = LatentGrid(5, 3, 4)
TEXT = 6


def qkv(tokens, strength=2.0):
    generator = torch.Generator().manual_seed(0)
    return [strength * torch.randn(2, tokens, 2, 16, generator=generator) for _ in range(3)]


def test_the_weights_are_a_bound_and_better_ones():
    q, k, v = qkv(GRID.tokens)
    lse = {name: kind().attend_with_lse(q, k, v, GRID)[1] for name, kind in joint.WEIGHTS.items()}
    first, rest = slice(0, 12), slice(12, None)
    for name in ("bound", "first-frame"):
        torch.testing.assert_close(lse[name][..., first], lse["true"][..., first])
    assert (lse["bound"] <= lse["true"] + 1e-5).all()
    # What is added is the same in all frames, and never negative.
    added = (lse["first-frame"] - lse["bound"])[..., rest].unflatten(2, (4, 12))
    torch.testing.assert_close(added, added[:, :, :1].expand_as(added))
    assert (added >= -1e-6).all() and added.max() > 0.1
    lacking = [(lse["true"] - lse[name])[..., rest].abs().mean() for name in ("bound", "first-frame")]
    assert lacking[1] < 0.9 * lacking[0]
    outs = [kind().attend_with_lse(q, k, v, GRID)[0] for kind in joint.WEIGHTS.values()]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_what_is_noted_of_a_call():
    query, key, value = qkv(GRID.tokens + TEXT, 1.0)
    mask = torch.ones(2, GRID.tokens + TEXT, dtype=torch.bool)
    mask[1, -2:] = False
    weights = torch.einsum("bqhd,bkhd->bhqk", query, key) * 16**-0.5
    weights = weights.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, value)
    notes = joint.compare_weights(query, key, value, mask, GRID, exact)
    assert notes["mass"] == pytest.approx(
        weights[:, :, 12 : GRID.tokens, GRID.tokens :].sum(-1).mean().item(), rel=1e-4
    )
    assert notes["mass true"] == pytest.approx(notes["mass"], rel=1e-4)
    assert notes["mass bound"] > notes["mass"] and notes["kl"] > 0
    assert 0 < notes["error true"] < notes["error bound"]


def test_with_exact_blocks_all_weights_are_true(monkeypatch):
    everything = {"exact": ExactBlocks(band=5)}
    for name, kind in joint.WEIGHTS.items():
        monkeypatch.setitem(joint.WEIGHTS, name, lambda kind=kind: kind(**everything))
    query, key, value = qkv(GRID.tokens + TEXT, 1.0)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value)))
    notes = joint.compare_weights(query, key, value, None, GRID, exact.transpose(1, 2))
    assert notes["error bound"] < 1e-5 and notes["error true"] < 1e-5
    assert abs(notes["kl"]) < 1e-5 and notes["mass bound"] == pytest.approx(notes["mass"], rel=1e-4)


def test_the_model_takes_what_a_pipeline_of_wan_gives_it():
    torch.manual_seed(0)
    model = joint.JointTransformer(num_layers=1, num_single_layers=1).eval()
    torch.nn.init.normal_(model.model.proj_out.weight)
    latents, sigma = torch.randn(2, 16, 4, 4, 6), torch.tensor([0.3, 0.6])
    text = torch.zeros(2, 512, TEXT_DIM)
    text[0, :7], text[1, :3] = torch.randn(7, TEXT_DIM), torch.randn(3, TEXT_DIM)

    @torch.no_grad()
    def predict(text):
        return velocity(model, latents, torch.zeros_like(latents), sigma, text)

    out = predict(text)
    assert out.shape == latents.shape and out.std() > 0
    # As many rows as in training give the same.
    torch.testing.assert_close(predict(text[:, :TRAIN_TOKENS]), out)
    recorder = joint.Recorder()
    with vmonarch.apply(model, recorder) as installation:
        torch.testing.assert_close(predict(text), out)
        assert installation.grid == (4, 2, 3)
    assert len(recorder.notes) == 2
    assert all(note["mass true"] == pytest.approx(note["mass"], rel=1e-3) for note in recorder.notes)
    with vmonarch.apply(model, VMonarchProcessor()):
        assert not torch.equal(predict(text), out)


def test_the_table_names_every_weight():
    results = {
        "attention": {
            "mass": 0.2,
            "kl": 0.1,
            **{f"{what} {name}": 0.3 for what in ("mass", "error") for name in joint.WEIGHTS},
        },
        "psnr": {name: [20.0, 22.0] for name in joint.WEIGHTS},
        "study": vars(joint.JointStudy()),
        "log": [{"step": 1234}],
        "parameters": 9_500_000,
        "hardware": "H200",
        "date": "2026-11-25",
        "command": "x",
    }
    text = joint.joint_table(results)
    assert "| first-frame | 30.0% | 0.3000 | 21.00 |" in text and "20.0%" in text and "1,234" in text
