"""What may compile kernels: versions of Triton that they were not tested with, and the assembler for Hopper.

Norm and rotary embedding have the cheapest kernels.
"""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from op_checks import OPS, in_interpreter
from triton import knobs
from triton.backends.nvidia import compiler

from vmonarch.kernels.common import launch, trust
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.common.trust import TESTED_TRITON, Kernels
from vmonarch.kernels.flash_bias.api import flash_bias_attention
from vmonarch.kernels.norm_rotary.api import norm_rotary

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture
def untested(monkeypatch):
    """No version of Triton is tested, nothing is checked yet, and "auto" takes the kernels in the interpreter."""
    monkeypatch.setattr(trust, "TESTED_TRITON", ("0.1", "0.2"))
    monkeypatch.setattr(launch, "auto_takes_kernels", lambda device: True)
    monkeypatch.setattr(trust, "_verdicts", {})
    # No call is replayed with the kernel that an earlier test had planted.
    with launch_overrides({}):
        yield


class Planted:
    """A kernel in place of another: it runs that one and then `bug(arguments)`."""

    def __init__(self, kernel, bug):
        self.kernel, self.bug, self.launches = kernel, bug, 0

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            self.launches += 1
            self.kernel[grid](*arguments, **constants)
            self.bug(arguments)

        return run


def plant(monkeypatch, name, bug):
    from vmonarch.kernels.norm_rotary import op

    planted = Planted(getattr(op, name), bug)
    monkeypatch.setattr(op, name, planted)
    return planted


RANDOM = torch.Generator().manual_seed(1)
INPUTS = [torch.randn(shape, generator=RANDOM) for shape in ((1, 5, 16), (16,), (1, 5, 1, 8), (1, 5, 1, 8))]


def call(implementation="auto", dtype=torch.float32):
    return norm_rotary(*(x.to(dtype) for x in INPUTS), heads=2, eps=1e-6, implementation=implementation)


def does_not_compile(arguments):
    from triton.compiler.errors import CompilationError

    raise CompilationError("def kernel(): ...", None, "planted")


BUGS = {
    "value": ("norm_rotary_kernel", lambda a: a[4].mul_(1.1), "result 0 is off by"),
    "not finite": ("norm_rotary_kernel", lambda a: a[4].view(-1)[3].fill_(torch.nan), "result 0 is off by nan"),
    "gradient": ("norm_rotary_backward_kernel", lambda a: a[5].mul_(-1), "the gradient of x is off by"),
    "compilation": ("norm_rotary_kernel", does_not_compile, "CompilationError: .*planted"),
}


@in_interpreter
@pytest.mark.parametrize(("kernel", "bug", "reason"), BUGS.values(), ids=BUGS)
def test_kernels_that_fail_are_replaced_by_plain_torch_with_one_warning(monkeypatch, untested, kernel, bug, reason):
    planted = plant(monkeypatch, kernel, bug)
    with pytest.warns(RuntimeWarning, match=f"(?s)portable kernels of norm_rotary .* {reason}.*Plain torch") as caught:
        out = call()
    assert torch.equal(out, call("torch")) and len(caught) == 1
    assert "Tested versions of Triton: 0.1, 0.2." in str(caught[0].message)
    assert "Please report" in str(caught[0].message)
    assert planted.launches == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(), out)
        call(dtype=torch.float64)
        with pytest.raises(NotImplementedError, match=f'(?s)norm_rotary with implementation="triton": .*{reason}'):
            call("triton")
    assert planted.launches == 1


@in_interpreter
def test_the_check_knows_nothing_of_how_it_is_called(monkeypatch, untested):
    from torch._subclasses.fake_tensor import FakeTensorMode

    modes = {
        "inference": torch.inference_mode(),
        "no_grad": torch.no_grad(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "fake": FakeTensorMode(allow_non_fake_inputs=True),
        "overrides": launch_overrides({"hopper": {"enabled": 0}}),
    }
    for name, mode in modes.items():
        trust._verdicts.clear()
        with mode, warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        assert list(trust._verdicts.values()) == [None], name


def test_a_tested_version_costs_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("a verdict was looked for")

    for name in ("_checked", "check"):
        monkeypatch.setattr(trust, name, refuse)
    monkeypatch.setattr(trust, "TESTED_TRITON", (trust._triton_version(),))
    monkeypatch.setattr(launch, "on_hopper", lambda device: True)
    half = torch.zeros(1, 4, 1, 16, dtype=torch.float16)
    for op in OPS:
        assert launch._why_not_compiled(op, CPU, torch.float16) is None
        assert launch.hopper_fits(op, half)


def test_a_check_during_a_capture_is_refused_and_a_verdict_taken(monkeypatch, untested):
    gpu, checks = torch.device("cuda", 0), []
    monkeypatch.setattr(trust, "check", checks.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="portable kernels of window for float16 .* call the function once before"):
        trust.why_distrusted("window", gpu, torch.float16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    trust.why_distrusted("window", gpu, torch.float16)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert trust.why_distrusted("window", gpu, torch.float16) is None
    assert len(checks) == 1


@in_interpreter
def test_portable_kernels_take_the_place_of_those_for_hopper(monkeypatch, untested):
    # Gluon has no interpreter: what is for Hopper fails there.
    monkeypatch.setattr(launch, "on_hopper", lambda device: True)
    tensors = torch.randn(5, 1, 4, 1, 16, generator=torch.Generator().manual_seed(0)).half()
    attend = lambda how="auto": flash_bias_attention(*tensors, implementation=how)
    with pytest.warns(RuntimeWarning, match="(?s)the Hopper kernels of flash_bias .*portable kernels are") as caught:
        out = attend()
    assert len(caught) == 1 and torch.allclose(out, attend("torch"), atol=2e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(attend(), out) and torch.equal(attend("triton"), out)


@in_interpreter
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_every_op_agree_with_their_case(op):
    assert trust.check(Kernels(op, False, torch.float32, CPU)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_kernels_agree_on_this_gpu(monkeypatch, untested, op):
    from vmonarch.kernels.hopper import backward, flash, r_step

    called = []
    entries = {
        "monarch": [(r_step, "r_step"), (backward, "launch_rows")],
        "flash_entropy": [(flash, "flash"), (backward, "launch_rows"), (backward, "launch_keys")],
        "flash_bias": [(flash, "flash"), (backward, "launch_rows"), (backward, "launch_keys")],
    }.get(op, [])
    for module, name in entries:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _o=original, _n=name, **k: (called.append(_n), _o(*a, **k))[1])
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for hopper in (False, True):
                assert trust._failure(Kernels(op, hopper, dtype, device)) is None
    if launch.on_hopper(device):
        assert {name for _, name in entries} <= set(called)


def test_bounds_of_the_package_and_constraints_say_what_was_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    minors = sorted({tuple(map(int, version.split(".")[:2])) for version in TESTED_TRITON})
    (major, first), (_, last) = minors[0], minors[-1]
    assert f"triton>={major}.{first},<{major}.{last + 1}; platform_system == 'Linux'" in extras["tested"]
    pinned = {}
    for name in ("constraints.txt", "constraints-newest.txt"):
        pins = dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        pinned[name] = pins["triton"]
        assert pins["triton"] in TESTED_TRITON
    assert pinned["constraints-newest.txt"] == TESTED_TRITON[-1]
    assert ", ".join(TESTED_TRITON[:-1]) + f" and {TESTED_TRITON[-1]}" in (ROOT / "docs" / "kernels.md").read_text()


# --- The assembler. ---


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
    trust.why_unsound.cache_clear()
    yield versions
    trust.why_unsound.cache_clear()
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
    assert trust.why_unsound() is None
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
