"""Replay calls for a GPU that is not there: kernels are started again with what an ordinary launch gives them.

    python replay_for_gpu.py ARCHITECTURE OP '{"tokens": 12, "dims": 64, "grid": [3, 2, 2], …}'

The tensors lie on the CPU and are never read. A call is made as usual, then twice more, of which the last is a replay,
forward and backward. Buffers may lie elsewhere then, but always where they were at their first use, and those that are
in use at the same time apart. Prints the number of launches.
"""

import gc
import json
import os
import sys

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from compile_for_gpu import AbsentGPU

import vmonarch
from vmonarch.kernels.common import launch, trust

launches = []


class Compiled(CompiledKernel):
    """A kernel that notes what it is launched with."""

    packed_metadata = ()

    def __init__(self, function):
        self.function = function

    def launch_metadata(self, *_):
        return None

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, exit, *args):
        whole = [part for arg in args for part in (arg if isinstance(arg, tuple) else [arg])]
        launches.append(((x, y, z), function, whole))


def compiled(kernel, key, *_):
    """In place of a compilation."""
    kernel.device_caches[0][0][key] = made = Compiled(f"{kernel.__name__} {key}")
    return made


def parts(arg):
    """(what has an address, all else) of an argument."""
    if hasattr(arg, "block_shape"):
        return arg.base, (arg.shape, arg.strides, arg.block_shape, getattr(arg, "layout", None))
    return (arg, None) if isinstance(arg, torch.Tensor) or isinstance(arg, int) and arg > 2**32 else (None, arg)


def check(ordinary, replayed, inputs):
    """Of the launches of two calls: they agree but for where buffers lie."""
    assert len(ordinary) == len(replayed) > 0
    moved, used = {}, {}
    for step, (one, other) in enumerate(zip(ordinary, replayed, strict=True)):
        assert one[:2] == other[:2] and len(one[2]) == len(other[2]), (one, other)
        for x, y in zip(one[2], other[2], strict=True):
            (tensor, rest), (again, other_rest) = parts(x), parts(y)
            assert rest == other_rest and (tensor is None) == (again is None), (one[1], rest, other_rest)
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            address = again if isinstance(again, int) else again.data_ptr()
            start = address - (tensor.data_ptr() - storage.data_ptr())
            assert moved.setdefault(storage._cdata, start) == start, f"{one[1]} reads another place"
            used.setdefault(storage._cdata, (start, start + storage.nbytes(), []))[2].append(step)
    for tensor in inputs:
        storage = tensor.untyped_storage()
        assert moved.get(storage._cdata, storage.data_ptr()) == storage.data_ptr(), "an input is another"
    places = list(used.values())
    for i, (start, stop, steps) in enumerate(places):
        for other_start, other_stop, others in places[:i]:
            apart = stop <= other_start or other_stop <= start
            assert apart or steps[-1] < others[0] or others[-1] < steps[0], "a buffer is used twice"


def main():
    architecture, name, options = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    driver.set_active(AbsentGPU(architecture))
    JITFunction._do_compile = compiled
    launch.on_hopper = lambda device: architecture == 90
    launch.use_triton.__kwdefaults__["why_not"] = lambda *tensors: None
    trust.why_unsound = lambda: None
    shape = 1, options.pop("tokens"), 2, options.pop("dims")
    number = 5 if name == "flash_bias_attention" else 3
    inputs = [torch.zeros(shape, dtype=torch.float16, requires_grad=True) for _ in range(number)]
    cotangent = torch.zeros(shape, dtype=torch.float16)

    def call():
        launches.clear()
        with torch.autograd.set_multithreading_enabled(False):
            found = getattr(vmonarch, name)(*inputs, **options, implementation="triton")
            out = found[0] if isinstance(found, tuple) else found
            torch.autograd.grad(out, inputs, cotangent)
            with torch.no_grad():
                getattr(vmonarch, name)(*inputs, **options, implementation="triton")
        return list(launches)

    with launch.launch_overrides({}):
        ordinary = call()
    call()
    run, JITFunction.run = JITFunction.run, None
    replayed = call()
    JITFunction.run = run
    check(ordinary, replayed, [*inputs, cotangent])
    print(len(replayed))
    storages = [StorageWeakRef(x.untyped_storage()) for x in inputs]
    for kept in (launches, ordinary, replayed, inputs):
        kept.clear()
    gc.collect()
    assert all(storage.expired() for storage in storages), "a record keeps a tensor"


if __name__ == "__main__":
    main()
