"""Calls are recorded once and replayed, bit by bit the same; what is like no call before, or not understood, is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from op_checks import assert_bits, in_interpreter, quiet, with_gradients

import vmonarch
from vmonarch.kernels.common import replay
from vmonarch.kernels.common.launch import launch_overrides
from vmonarch.kernels.common.trust import TESTED_TRITON
from vmonarch.kernels.int8 import op

SCRIPT = Path(__file__).parents[1] / "support" / "replay_for_gpu.py"
GRID = {"grid": (3, 2, 2)}
LITE = {"coarse": 2, "row_share": 0.5, "last_l_update": False}
OPS = {
    "default": (vmonarch.vmonarch_attention, GRID),
    "lite": (vmonarch.vmonarch_attention, {**GRID, **LITE}),
    "one-iteration": (vmonarch.vmonarch_attention, {**GRID, "num_iterations": 1, "exact": None}),
    "blocks": (vmonarch.monarch_attention, {"block_size": 5}),
    "two-resolutions": (vmonarch.two_resolution_attention, GRID),
    "flash": (vmonarch.flash_entropy_attention, {}),
    "linear": (vmonarch.taylor_attention, {"causal": True}),
    "window": (vmonarch.window_attention, {**GRID, "window": (3, 1, 2)}),
}


@pytest.fixture
def recorded():
    """recorded(function): (the function, which is replayed; the arguments of the calls that ran its Python)."""

    def make(function):
        calls = []
        return replay.replayed(lambda *args: (calls.append(args), function(*args))[1]), calls

    return make


def qkv_of(seed):
    return torch.randn(3, 1, 12, 1, 16, generator=torch.Generator().manual_seed(seed)).unbind(0)


FIRST_CALL = """
import sys, torch, vmonarch
vmonarch.vmonarch_attention(*torch.randn(3, 1, 12, 1, 16), grid=(3, 2, 2), implementation="triton")
print("torch._dynamo" in sys.modules)
"""


def test_the_first_call_waits_for_no_import_of_torch_compile(child_environment):
    run, environment = [sys.executable, "-c", FIRST_CALL], child_environment | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "False", result.stderr


@in_interpreter
@quiet
@pytest.mark.parametrize("name", OPS)
def test_a_replay_is_the_call_bit_by_bit(name):
    function, options = OPS[name]
    call = lambda *qkv: function(*qkv, **options, implementation="triton")
    results = lambda found: found if isinstance(found, tuple) else (found,)
    earlier = []
    for seed in range(2):
        qkv = qkv_of(seed)
        with torch.inference_mode():
            found = results(call(*qkv))
            with launch_overrides({}):
                expected = results(call(*qkv))
        assert_bits(found, expected)
        with launch_overrides({}):
            expected += with_gradients(call, qkv)
        assert_bits((*found, *with_gradients(call, qkv)), expected)
        earlier.append((found, [x.clone() for x in found]))
    # No later call writes to what an earlier one gave.
    for found, copies in earlier:
        assert_bits(found, copies)


def test_every_sort_of_tensors_has_a_record_of_its_own(recorded):
    function, calls = recorded(lambda x, y, n: (x[1:] + y[:1] * n,))
    memory = torch.arange(200.0)
    sorts = {
        "plain": (memory[:20].view(5, 4), memory[40:60].view(5, 4).clone(), 2),
        "strides": (memory[:20].view(4, 5).t(), memory[40:60].view(5, 4).clone(), 2),
        "alignment": (memory[1:21].view(5, 4), memory[40:60].view(5, 4).clone(), 2),
        "sizes": (memory[:12].view(3, 4), memory[40:52].view(3, 4).clone(), 2),
        "dtype": (memory[:20].double().view(5, 4), memory[40:60].view(5, 4).clone(), 2),
        "number": (memory[:20].view(5, 4), memory[40:60].view(5, 4).clone(), 3),
        "shared memory": (memory[:20].view(5, 4), memory[40:60].view(5, 4), 2),
        "shared memory, nearer": (memory[:20].view(5, 4), memory[20:40].view(5, 4), 2),
        "none": (memory[:20].view(5, 4), memory[40:60].view(5, 4).clone(), 2.5),
    }
    for turn in range(2):
        for x, y, n in sorts.values():
            assert_bits(function(x, y, n), (x[1:] + y[:1] * n,))
        memory += 1
        assert len(calls) == len(sorts), turn


KNOWN = torch.ones(4)
NOT_UNDERSTOOD = {
    "a number": (lambda x: (x * x.sum().item(),), "may depend on what is in memory"),
    "sizes of data": (lambda x: (x[x > 0],), "may depend on what is in memory"),
    "a constant written": (lambda x: (KNOWN.add_(x) - KNOWN + x,), "may write to a constant"),
    "a constant given": (lambda x: (x + 1, KNOWN), "a result is a constant"),
    "another dtype": (lambda x: (x.clone().view(torch.int32) + 1,), "memory of torch.float32 is read as torch.int32"),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_what_is_not_understood_is_not_replayed(recorded, name):
    plain, why_not = NOT_UNDERSTOOD[name]
    function, calls = recorded(plain)
    for x in (torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([-1.0, -2.0, 3.0, -4.0])):
        assert_bits(function(x), plain(x))
    assert len(calls) == 2
    (record,) = function.records.values()
    assert why_not in record


@in_interpreter
def test_tensors_inside_of_named_tuples_are_those_of_the_call():
    call = lambda seed: vmonarch.int8_attention(*qkv_of(seed), return_lse=True, implementation="triton")
    for seed in range(2):
        found = call(seed)
        with launch_overrides({}):
            assert_bits(found, call(seed))
    assert op._forward.records and all(map(callable, op._forward.records.values()))


def test_constants_and_what_operators_write_are_as_in_the_call(recorded):
    table = torch.arange(4.0)

    def plain(x):
        parts = torch.cat([x, table]).chunk(2)
        sums = torch.zeros_like(x)
        sums[1:] += parts[0][1:]
        values, places = torch.sort(sums * parts[1])
        return values, None, places, x[2:]

    function, calls = recorded(plain)
    for x in torch.randn(3, 4):
        assert_bits(function(x), plain(x))
    assert len(calls) == 1


def test_calls_that_may_use_other_kernels_leave_no_record(recorded, monkeypatch):
    function, calls = recorded(lambda x: (x + 1,))
    x = torch.ones(3)
    with launch_overrides({"hopper": {"enabled": 0}}):
        function(x)
    with monkeypatch.context() as patch:
        patch.setattr(replay, "is_checking", lambda: True)
        function(x)
    with monkeypatch.context() as patch:
        patch.setattr(replay.triton.knobs.runtime, "launch_enter_hook", print)
        function(x)
    assert len(calls) == 3 and not function.records


def test_an_error_leaves_no_record_and_no_recorder(recorded):
    def plain(x, fails):
        if fails:
            raise ValueError("no")
        return (x + 1,)

    function, calls = recorded(plain)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            function(torch.ones(2), True)
    assert len(calls) == 2 and not function.records and replay._recorder.get() is None
    assert_bits(function(torch.ones(2), False), (torch.full((2,), 2.0),))


def test_records_are_bounded_and_the_oldest_go_first(recorded, monkeypatch):
    monkeypatch.setattr(replay, "MAX_RECORDS", 3)
    function, calls = recorded(lambda x, n: (x + n,))
    for n in (0, 1, 2, 3, 3, 2, 1):
        assert_bits(function(torch.ones(2), n), (torch.full((2,), 1.0 + n),))
        assert len(function.records) <= 3
    assert [n for _, n in calls] == [0, 1, 2, 3]
    function(torch.ones(2), 0)
    assert len(calls) == 5


def test_buffers_in_use_at_the_same_time_lie_apart_and_others_share():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        numbers = torch.randint(1, 2000, (12, 3), generator=generator).tolist()
        buffers = {i: (size, min(a % 9, b % 9), max(a % 9, b % 9)) for i, (size, a, b) in enumerate(numbers)}
        offsets, whole = replay._packed(buffers)
        for i, (size, first, last) in buffers.items():
            assert offsets[i] % 512 == 0 and offsets[i] + size <= whole
            for j in range(i):
                other, since, until = buffers[j]
                apart = offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]
                assert apart or last < since or until < first
    assert replay._packed({0: (512, 0, 1), 1: (512, 2, 3), 2: (512, 1, 2)})[1] == 1024


@pytest.fixture(scope="module")
def forks(start_forks):
    package = str(Path(vmonarch.__file__).parents[1])
    return start_forks(str(SCRIPT), PYTHONPATH=package, TRITON_INTERPRET="0")


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", [*OPS, "bias"])
def test_compiled_kernels_are_started_with_what_an_ordinary_launch_gives_them(forks, tmp_path, name, architecture):
    function, options = OPS.get(name, (vmonarch.flash_bias_attention, {}))
    sizes = {"tokens": 12, "dims": 16 if name == "linear" else 64}
    words = architecture, function.__name__, json.dumps(options | sizes)
    code, output = forks(tmp_path, SCRIPT, *words)
    assert code == 0, output[-3000:]
    assert int(output.splitlines()[-1]) > 0


def test_an_untested_triton_launches_as_usual(monkeypatch):
    class Kernel(replay.CompiledKernel):
        def __init__(self):
            pass

    assert replay._is_known(Kernel()) and not replay._is_known(object())
    monkeypatch.setattr("vmonarch.kernels.common.trust.TESTED_TRITON", TESTED_TRITON[:0])
    assert not replay._is_known(Kernel())
