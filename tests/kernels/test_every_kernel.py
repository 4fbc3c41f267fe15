"""The calls that a sanitizer looks at: plain torch takes them too. That they launch every kernel, a GPU test shows."""

import every_kernel
import pytest
import torch


@pytest.mark.parametrize("family", every_kernel.FAMILIES)
def test_the_calls_are_good_ones(monkeypatch, family):
    # One of many frames will do.
    monkeypatch.setitem(every_kernel.CALLS, "many_frames", every_kernel.CALLS["many_frames"][:2])
    every_kernel.run(family, "cpu", "torch", torch.float32)


def test_families_and_forms_are_listed(capsys):
    every_kernel.main(["--list"])
    assert "taylor hopper\ntaylor portable\nwindow portable\n" in capsys.readouterr().out
