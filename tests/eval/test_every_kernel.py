"""The calls that a sanitizer looks at: plain torch takes them too. That they launch every kernel, a GPU test shows."""

import pytest
import torch

from vmonarch.eval.studies import every_kernel


@pytest.mark.parametrize("family", every_kernel.FAMILIES, ids=lambda family: family.__name__)
def test_the_calls_are_good_ones(monkeypatch, family):
    # One of many frames will do.
    monkeypatch.setattr(every_kernel.Caller, "attend", smaller(every_kernel.Caller.attend, {81, 140}))
    family(every_kernel.Caller("cpu", "torch", torch.float32))


def smaller(attend, skipped):
    def of_few_frames(self, op, Sq, Sk, D, *others, **options):
        if options.get("grid", (0,))[0] not in skipped:
            attend(self, op, Sq, Sk, D, *others, **options)

    return of_few_frames


def test_families_and_forms_are_listed(capsys):
    assert every_kernel.main(["--list"]) == 0
    assert "taylor hopper\ntaylor portable\nwindow portable\n" in capsys.readouterr().out
