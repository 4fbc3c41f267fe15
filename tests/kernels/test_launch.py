"""Which assembler Hopper gets, and how `test_compiles` finds unsound code."""

import pytest
import torch
from machine_code import reads_of_unwritten
from triton import knobs
from triton.backends.nvidia import compiler

from vmonarch.kernels.common import assembler, launch


@pytest.fixture
def tools(monkeypatch):
    """Versions of assemblers by the last part of their paths, in a process that has not asked yet."""
    versions = {"ptxas": "12.8", "ptxas-blackwell": "12.9", "of-triton": "12.8"}

    def tool(path):
        version = versions[path.rsplit("/", 1)[-1]]
        return version and knobs.NvidiaTool(path, version)

    monkeypatch.setattr(knobs.NvidiaTool, "from_path", tool)
    monkeypatch.setattr(compiler, "get_ptxas", lambda architecture: tool("of-triton"))
    monkeypatch.setattr(knobs, "propagate_env", False)
    assembler.why_unsound.cache_clear()
    yield versions
    assembler.why_unsound.cache_clear()
    vars(knobs.nvidia).pop("ptxas", None)


@pytest.mark.parametrize(
    "versions,chosen",
    [
        ({"ptxas": "13.0"}, "torch/bin/ptxas"),
        ({"ptxas": "12.8"}, "nvidia/bin/ptxas-blackwell"),
        ({"ptxas": None}, "ptxas-blackwell"),
        ({"of-triton": "12.9"}, None),
    ],
    ids=["of-torch", "of-triton", "without-torch", "sound"],
)
def test_a_later_assembler_takes_the_place_of_one_that_is_unsound(tools, versions, chosen):
    tools |= versions
    assert assembler.why_unsound() is None
    assert vars(knobs.nvidia)["ptxas"].endswith(chosen) if chosen else "ptxas" not in vars(knobs.nvidia)


def test_without_a_sound_assembler_hopper_gets_no_kernel(tools, monkeypatch):
    tools["ptxas-blackwell"] = "12.8"
    monkeypatch.setattr(launch, "on_hopper", lambda device: True)
    monkeypatch.setattr(launch, "auto_takes_kernels", lambda device: True)
    query = torch.zeros(1, 4, 1, 16)

    def decide(implementation):
        return launch.use_triton("an op", implementation, query, op="window", why_not=lambda *tensors: None)

    with pytest.warns(RuntimeWarning, match=r"ptxas 12\.8 makes wrong code for Hopper.*from 12\.9 on.*Plain torch"):
        assert decide("auto") is False
    with pytest.raises(NotImplementedError, match=r"ptxas 12\.8 makes wrong code for Hopper"):
        decide("triton")


# What ptxas 12.8 and 12.9 make of the same descriptor: the base is UR40.
UNSOUND = """
        /*0d00*/                   UIADD3 UR12, UP0, UR12, 0x40, URZ ;        /* 0x000000400c0c7890 */
        /*0d20*/                   UIADD3 UR11, UR42, 0x4000, URZ ;           /* 0x000040002a0b7890 */
        /*0d70*/                   USHF.R.U32.HI UR40, URZ, 0x4, UR11 ;       /* 0x000000043f287899 */
        /*0dd0*/                   UIADD3.X UR11, UR13, -0x7fffffe0, URZ, UP0, !UPT ;
"""
SOUND = """
        /*0d20*/                   UIADD3 UR11, UR42, 0x4000, URZ ;           /* 0x000040002a0b7890 */
        /*0d70*/                   USHF.R.U32.HI UR40, URZ, 0x4, UR11 ;       /* 0x000000043f287899 */
        /*0e50*/                   UIADD3 UR12, UP1, UR40, 0x40, URZ ;        /* 0x00000040280c7890 */
        /*0ed0*/                   UIADD3.X UR13, UR40, 0x80, URZ, UP1, !UPT ;
        /*0e90*/             @!UP0 UIADD3.64 UR26, UR12, 0x80, URZ ;          /* 0x000000800c1a7890 */
        /*1000*/                   HGMMA.64x32x16.F32.BF16 R56, R72, gdesc[UR24].tnspB, R56 ;
"""


def test_reads_of_what_nothing_has_written_are_found():
    before = "        /*0010*/                   S2UR UR42, SR_CgaCtaId ;\n"
    assert reads_of_unwritten(before + UNSOUND) == ["UIADD3", "UIADD3.X"]
    assert reads_of_unwritten(before + SOUND) == []
    # Of the four registers of a product with both factors in memory, nothing has written the first two.
    assert reads_of_unwritten(before + SOUND.replace("R72, gdesc", "gdesc")) == ["HGMMA.64x32x16.F32.BF16"]
