"""Launch options: what overrides may say."""

import pytest
import torch
from interpreter import faster
from triton.language import core

from vmonarch.kernels.common.launch import launch_options, launch_overrides


@pytest.mark.parametrize(
    "kernel", ["hopper_r_step", "hopper_r_step_pooled", "hopper_r_step_last", "hopper_r_step_values"]
)
def test_an_r_step_on_hopper_with_one_place_for_z_is_refused(kernel):
    """It would wait for ever."""
    with (
        pytest.raises(ValueError, match=rf"'{kernel}': Q_STAGES is 1 \(supported: 2 to 4\)"),
        launch_overrides({kernel: {"Q_STAGES": 1}}),
    ):
        pass


@pytest.mark.parametrize(
    "options,message",
    [
        ({"hopper_flash": {"STAGES": 1}}, r"'hopper_flash': STAGES is 1 \(supported: 2 to 8\)"),
        ({"hopper_flash": {"BLOCK_N": 32}}, r"'hopper_flash': BLOCK_N is 32 \(supported: 64, 128\)"),
        ({"window": {"BLOCK": 48}}, r"'window': BLOCK is 48 \(supported: 16, 32, 64, 128, 256\)"),
        ({"l_rows": {"num_warps": 3}}, r"'l_rows': num_warps is 3 "),
        ({"taylor": {"num_warps": 8}}, r"'taylor': num_warps is 8 \(supported: 4\)"),
        ({"r_step": {}, "hopper": {"enabled": 2}}, r"'hopper': enabled is 2 \(supported: 0, 1\)"),
        ({"r_step": {"BLOCKN": 16}}, r"'r_step': no option 'BLOCKN' \(options: .*BLOCK_N"),
        ({"r_steps": {"BLOCK_N": 16}}, r"'r_steps': no such kernel \(kernels: .*r_step"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_overrides_that_no_kernel_supports_are_refused(options, message):
    with pytest.raises(ValueError, match=message), launch_overrides(options):
        pass


def test_overrides_that_are_supported_are_used_while_they_last():
    def options():
        return launch_options("r_step", torch.device("cpu"), torch.float16, 64)

    before = options()
    with launch_overrides({"r_step": {"BLOCK_N": 128}, "hopper_r_step": {"Q_STAGES": 2, "STAGES": 2}}):
        assert options() == {**before, "BLOCK_N": 128}
    assert options() == before


def test_where_kernels_are_compiled_the_language_stays_tritons_own(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    owned = core.tensor.__init__
    with faster():
        assert core.tensor.__init__ is owned
