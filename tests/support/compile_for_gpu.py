"""Compile every kernel of a forward and backward call for a GPU that is not there; print one JSON line per kernel.

    python compile_for_gpu.py ARCHITECTURE '{"grid": [16, 28, 52], "dim": 128, …}'         VMonarch
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "rank": 9, "dim": 128, …}'    FlashBias
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "dim": 16, "width": 64, …}'   linear attention
    python compile_for_gpu.py ARCHITECTURE '{"grid": [4, 8, 8], "window": [3, 5, 5], "dim": 64, …}'   windows
    python compile_for_gpu.py ARCHITECTURE '{"grid": [4, 8, 8], "tile": [2, 4, 4], "dim": 64, …}'     two resolutions
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "channels": 1536, "dim": 128, …}'   norm, rotary
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "residual": true, "dim": 128, …}'   residuals
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "merge": true, "dim": 128, …}'       merging
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "eight": true, "dim": 128, …}'       eight bits

A kernel launch is replaced by a compilation with the same arguments: the tensors lie on the CPU and are never read.
With "compile": false only the arguments are made, descriptors too, and the hash of what would be compiled. With "row":
32 the rows of query, key and value are 32 numbers apart, more than "dim". With "parts": 2 the keys of a tile of queries
are cut in two on Hopper. With "only": "_hopper_" kernels of other names are left out. With "triton": "3.6.0" any other
version of Triton is refused.
"""

import contextlib
import importlib
import io
import json
import math
import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"
# Triton prints what its assembler says.
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

import vmonarch
from vmonarch.kernels.common import launch, trust
from vmonarch.kernels.flash_entropy import segments
from vmonarch.kernels.norm_rotary import api as norms
from vmonarch.kernels.residual import api as residuals

# Tensors on the CPU stand for those of an unknown chip, which gets the default options.
tabled_options = launch._tabled_options
launch._tabled_options = lambda kernel, chip, *others: tabled_options(kernel, "unknown", *others)
segments.processors = lambda device: 132
# What takes these from there is imported now, once for all forks of a process.
OPS = ("flash_bias", "flash_entropy", "int8", "merge", "monarch", "norm_rotary", "taylor", "two_resolution", "window")
for name in OPS:
    importlib.import_module(f"vmonarch.kernels.{name}.op")

make_cubin = CUDABackend.make_cubin
# All of Triton's files are hashed once for a process and its forks.
triton_key()


class AbsentGPU:
    """The part of Triton's driver that compilation asks."""

    def __init__(self, architecture):
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def set_current_device(self, device):
        pass


def assemble(backend, ptx, metadata, options, architecture):
    """The last step of a compilation, which also notes facts in those kept with the kernel:

    what the assembler spills to local memory, in bytes, and whether it makes asynchronous products wait.
    """
    with contextlib.redirect_stdout(io.StringIO()) as report:
        binary = make_cubin(backend, ptx, metadata, options, architecture)
    spilled = re.findall(r"(\d+) bytes spill stores", report.getvalue())
    metadata["spilled"] = max(int(number) for number in spilled)
    metadata["serialized"] = "are serialized" in report.getvalue()
    return binary


def idle_barriers(text):
    """Names in Triton's intermediate code of barriers that are begun and that no warps wait for.

    What nobody uses gives its shared memory to something else, and memory that holds a barrier must hold nothing else.
    """
    buffers = dict(re.findall(r"(%\w+) = ttg.memdesc_index (%\w+)", text))
    begun = {buffers.get(name, name) for name in re.findall(r"ttng.init_barrier (%\w+)", text)}
    taken = ", ".join(re.findall(r"ttg.warp_specialize\((.*?)\)", text))
    return sorted(begun.difference(taken.split(", ")))


def hash_only(kernel, key, signature, device, constexprs, options, attrs, warmup):
    """In place of a compilation: what tells it from all others."""
    return kernel.ASTSource(kernel, signature, constexprs, attrs).hash() + options.hash()


def main():
    architecture, case = int(sys.argv[1]), json.loads(sys.argv[2])
    if case.get("triton", triton.__version__) != triton.__version__:
        sys.exit(f"this is Triton {triton.__version__}, not {case['triton']}")
    driver.set_active(AbsentGPU(architecture))

    def compile_instead(kernel, grid):
        def run(*arguments, **options):
            if not kernel.__name__.startswith(case.get("only", "")):
                return
            compiled = kernel.warmup(*arguments, grid=grid, **options)
            if not case.get("compile", True):
                print(json.dumps({"kernel": kernel.__name__, "hash": compiled}), flush=True)
                return
            facts = {
                "kernel": kernel.__name__,
                "hash": compiled.hash,
                "options": {name: value for name, value in options.items() if isinstance(value, int)},
                "shared": compiled.metadata.shared,
                "warp_specialized": "ttg.warp_specialize" in compiled.asm["ttgir"],
                "idle_barriers": idle_barriers(compiled.asm["ttgir"]),
                "spilled": compiled.metadata.spilled,
                "serialized": compiled.metadata.serialized,
            }
            print(json.dumps(facts), flush=True)

        return run

    JITFunction.__getitem__ = compile_instead
    CUDABackend.make_cubin = assemble
    if not case.get("compile", True):
        JITFunction._do_compile = hash_only
    if architecture == 90:
        assert trust.why_unsound() is None
    launch.on_hopper = lambda device: architecture == 90
    launch.use_triton.__kwdefaults__["why_not"] = norms.why_not_triton = lambda *tensors: None
    if "parts" in case:
        from vmonarch.kernels.hopper import two_resolution
        from vmonarch.kernels.hopper.backward import two_resolution as backward

        two_resolution.parts_of = backward.parts_of = lambda *_: case["parts"]
    with launch.launch_overrides(case.get("overrides", {})):
        launch_all(case)


def launch_all(case):
    """Forward and backward."""
    dim, grid = case["dim"], case.get("grid", ())
    tokens = math.prod(grid) if grid else case["tokens"]

    def zeros(*sizes, dtype=case["dtype"]):
        return torch.zeros(1, tokens, *sizes, dtype=getattr(torch, dtype))

    def qkv(heads=2):
        query, key, value = (zeros(heads, case.get("row", dim))[..., :dim] for _ in range(3))
        return [query, key, value[..., : case.get("value_dim", dim)]]

    def given(*names):
        return {name: case[name] for name in names if name in case}

    options = {"scale": case.get("scale", 0.1), "return_lse": True}
    if case.get("masked"):
        options["key_mask"] = zeros(dtype="bool")
    if "rank" in case:
        op, tensors = vmonarch.flash_bias_attention, [*qkv(), *(zeros(1, case["rank"]) for _ in range(2))]
        options |= given("causal")
    elif "window" in case:
        op, tensors, options = vmonarch.window_attention, qkv(), options | given("window", "grid")
    elif "tile" in case:
        op, tensors = vmonarch.two_resolution_attention, qkv()
        options |= given("grid", "tile", "rest")
    elif "channels" in case:
        angles = [torch.zeros(1, tokens, 1, dim) for _ in range(2)]
        op = lambda x, weight, **how: norms.norm_rotary(x, weight, *angles, **how)
        tensors = [zeros(case["channels"]), torch.zeros(case["channels"])]
        options = {"heads": case["channels"] // dim, "eps": 1e-6}
    elif "merge" in case:
        op, lse = (lambda *x, **how: vmonarch.merge_partials(x[:2], x[2:], **how)), torch.zeros(1, 2, tokens)
        out_1, out_2, _ = qkv()
        tensors, options = [out_1, lse, out_2, lse.clone()], {}
    elif "eight" in case:
        vmonarch.int8_attention(*qkv(), **options, implementation="triton")
        return
    elif "residual" in case:
        exact, out, _ = qkv()
        residual = residuals.attention_residual(exact, out, implementation="triton")
        residuals.renew_residual(residual, exact, out, implementation="triton")
        residuals.add_residual(out, residual, implementation="triton")
        return
    elif "width" in case:
        op, tensors = vmonarch.taylor_attention, [zeros(2, width) for width in (dim, dim, case["width"])]
        options = {"scale": 1.0} | given("causal")
    else:
        op, tensors = vmonarch.vmonarch_attention, qkv(1)
        options |= given("grid", "exact", "num_iterations", "coarse", "last_l_update")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    results = op(*leaves, **options, implementation="triton")
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.grad(results, leaves, [torch.zeros_like(x) for x in results])


if __name__ == "__main__":
    main()
