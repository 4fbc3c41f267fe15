"""The study of residual sharing: strategies at their limits are what they should be."""

import pytest
import torch

import vmonarch
from vmonarch import Refresh, VMonarchProcessor
from vmonarch.eval.studies.residual_sharing import Strategy, StudiedSharing


def studied(tiny, pipe, strategy):
    vmonarch.apply(pipe, VMonarchProcessor(refresh=1))
    pipe.transformer._vmonarch_record.context.sharing = StudiedSharing(Refresh(1), strategy)
    return tiny.generate(pipe, steps=6)


@pytest.mark.parametrize(
    "word, refresh, work",
    [
        ("schedule:2", 2, 2 / 6),
        ("extrapolated:1,0.5", 1, 1 / 6),
        ("pooled:2,1", 2, 2 / 6),
        ("heads:2,1", 2, 2 / 6),
        # Of 18 tokens four are looked at.
        ("head:0", 1.0, (1 + 5 * (1 + 4 / 18)) / 6),
        ("layer:0", 1.0, (1 + 5 * (1 + 4 / 18)) / 6),
        ("late:0", [0, 2, 3, 4, 5], (1 + 4 / 18 + 4 * (1 + 4 / 18)) / 6),
        ("head:9", 1, (1 + 5 * 4 / 18) / 6),
    ],
)
def test_strategies_at_their_limits(tiny, word, refresh, work):
    pipe = tiny.pipeline("t2v")
    strategy = Strategy.parse(word, 6, rows=4)
    actual = studied(tiny, pipe, strategy)
    vmonarch.apply(pipe, VMonarchProcessor(refresh=Refresh(refresh, "bfloat16")))
    torch.testing.assert_close(actual, tiny.generate(pipe, steps=6), rtol=1e-3, atol=1e-3)
    assert sum(strategy.shares) / len(strategy.shares) == pytest.approx(work)


def test_what_is_kept_of_a_residual():
    residual = torch.randn(2, 6, 3, 4)
    kept = lambda word: StudiedSharing(Refresh(1), Strategy.parse(word, 6, rows=4))._kept(residual)
    pairs = kept("pooled:2,2").unflatten(1, (3, 2))
    torch.testing.assert_close(pairs[:, :, 0], (residual[:, ::2] + residual[:, 1::2]) / 2)
    assert torch.equal(pairs[:, :, 0], pairs[:, :, 1])
    some, norms = kept("heads:2,0.5"), residual.norm(dim=(1, 3))
    for b in range(2):
        for h in range(3):
            rest = residual[b, :, h] if h != norms[b].argmin() else torch.zeros(6, 4)
            assert torch.equal(some[b, :, h], rest)


def test_a_slope_and_errors_between_change_the_result(tiny):
    pipe = tiny.pipeline("t2v")
    plain = studied(tiny, pipe, Strategy.parse("schedule:3", 6, rows=4))
    sloped = studied(tiny, pipe, Strategy.parse("extrapolated:3,0.5", 6, rows=4))
    torch.manual_seed(0)
    some = Strategy.parse("head:0.05", 6, rows=18)
    assert not torch.equal(sloped, plain) and not torch.equal(studied(tiny, pipe, some), plain)
    assert any(1 < share < 2 for share in some.shares[4:]), "some heads of a layer"
