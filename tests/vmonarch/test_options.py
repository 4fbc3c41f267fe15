"""The options of VMonarch attention: one object, checked when it is made, that travels to the kernels whole."""

import dataclasses

import pytest
import torch

from vmonarch import ExactBlocks, LatentGrid, VMonarchOptions, vmonarch_attention
from vmonarch.kernels.common.blocks import grid_places
from vmonarch.kernels.monarch.call import MonarchCall
from vmonarch.kernels.monarch.op import _decode, _encode

CHANGED = {
    "num_iterations": 3,
    "coarse": 2,
    "exact": ExactBlocks(rows=(1,), columns=(0, 2), band=1, aware=False),
    "row_share": 0.3,
    "last_l_update": False,
    "min_mass": 0.2,
}


def test_named_options_and_the_object_are_the_same():
    q, k, v = torch.randn(3, 1, 24, 2, 4)
    wanted = vmonarch_attention(q, k, v, grid=(3, 2, 4), **CHANGED)
    assert torch.equal(vmonarch_attention(q, k, v, grid=(3, 2, 4), options=VMonarchOptions(**CHANGED)), wanted)
    assert not torch.equal(vmonarch_attention(q, k, v, grid=(3, 2, 4)), wanted)
    with pytest.raises(TypeError, match="coarse must not be given beside options"):
        vmonarch_attention(q, k, v, grid=(3, 2, 4), options=VMonarchOptions(), coarse=2)
    with pytest.raises(TypeError, match="options must be None or VMonarchOptions, got dict"):
        vmonarch_attention(q, k, v, grid=(3, 2, 4), options={"coarse": 2})


def test_the_operator_loses_no_option():
    """What torch.compile sees of a call is numbers; every option is in them."""
    assert CHANGED.keys() == {field.name for field in dataclasses.fields(VMonarchOptions)}
    grid = LatentGrid(5, 4, 6)
    for exact in (CHANGED["exact"], None, ExactBlocks()):
        share = 0.3 if exact is CHANGED["exact"] else 1.0
        options = VMonarchOptions(**CHANGED | {"exact": exact, "row_share": share})
        call = MonarchCall(grid_places(grid, coarse=options.coarse), options, 0.3)
        assert _decode(*_encode(call)) == call
