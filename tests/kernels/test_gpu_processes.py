"""What shows only in processes of their own: the sanitizer's view of memory, and of races."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import every_kernel
import pytest
import torch

import vmonarch.kernels
from vmonarch.kernels.common.launch import on_hopper

_NAMES = "r_step flash rows keys int8 two_resolution two_resolution_queries two_resolution_keys"
SPECIALISED = {f"_hopper_{name}_kernel" for name in _NAMES.split()}
# Bytes of instructions.
DISPATCHED_BEFORE = 0x400


def run(script, *prefix, **environment):
    return subprocess.run(
        [*prefix, sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


CALLS = [(group, form) for group, forms in every_kernel.GROUPS.items() for form in forms]
each_call = pytest.mark.parametrize(("group", "form"), CALLS, ids=lambda name: name)


def sanitized(group, form, tool, *options):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    # Without torch's cache of memory, a row beyond a tensor is nobody's.
    script = f"import every_kernel; every_kernel.main('{group}', '{form}')"
    result = run(script, sanitizer, "--tool", tool, *options, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert "done" in result.stdout, result.stdout[-3000:] + result.stderr[-2000:]
    return result


@pytest.mark.gpu
@each_call
def test_no_access_outside_of_memory(group, form):
    result = sanitized(group, form, "memcheck", "--error-exitcode", "9")
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.gpu
def test_the_sanitizer_sees_every_kernel():
    def launched(call):
        result = run(f"import every_kernel; every_kernel.main(*{call})")
        assert result.returncode == 0, (call, result.stderr[-3000:])
        return set(result.stdout.split(": ")[1].split())

    with ThreadPoolExecutor(8) as threads:
        names = set().union(*threads.map(launched, CALLS))
    kernels = Path(vmonarch.kernels.__path__[0])
    defined = {
        name for file in kernels.rglob("*.py") for name in re.findall(r"^def (\w*_kernel)\(", file.read_text(), re.M)
    }
    assert defined - names == (set() if on_hopper(torch.device("cuda", 0)) else {n for n in defined if "hopper" in n})


ACCESS = re.compile(r"(?:between|and) (\w+) access at (\w+)\+(0x[0-9a-f]+)")


def races(report):
    """[(access, kernel, offset), …] of every race, without those of the dispatch of specialised warps.

    There Triton's compiler lets warps wait at barrier 1 and read from shared memory what to do, first of all that they
    read; other warps have written it before that barrier, or write it after the next one. racecheck reports it all the
    same, in every kernel with specialised warps.
    """

    def dispatches(access, kernel, offset):
        return access == "Read" and kernel in SPECIALISED and offset < DISPATCHED_BEFORE

    found = []
    for race in report.split("Race reported ")[1:]:
        first, *others = [(access, kernel, int(offset, 16)) for access, kernel, offset in ACCESS.findall(race)]
        if not dispatches(*first) and not (others and all(dispatches(*other) for other in others)):
            found.append([first, *others])
    return found


@pytest.mark.gpu
@each_call
def test_no_race(group, form):
    result = sanitized(group, form, "racecheck", "--print-limit", "10000")
    assert not races(result.stdout), races(result.stdout)


@pytest.mark.parametrize("group", every_kernel.GROUPS)
def test_the_calls_are_good_ones(monkeypatch, group):
    # One of many frames will do.
    monkeypatch.setitem(every_kernel.CALLS, "many_frames", every_kernel.CALLS["many_frames"][:2])
    every_kernel.run(group, "cpu", "torch", torch.float32)
