"""What the tests of residual sharing have in common."""

import pytest

from vmonarch import residuals
from vmonarch.residuals import Branch


@pytest.fixture
def used(monkeypatch):
    """((layer, samples, …), the residual that it adds or None where it is exact) of every call of a layer."""
    found, right = [], Branch.residual_of

    def note(self, layer):
        found.append((layer, right(self, layer)))
        return found[-1][1]

    monkeypatch.setattr(Branch, "residual_of", note)
    return found


@pytest.fixture
def renewed(monkeypatch):
    """The residuals as they are made."""
    found, right = [], residuals.attention_residual

    def note(*args, **kwargs):
        found.append(right(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(residuals, "attention_residual", note)
    return found
