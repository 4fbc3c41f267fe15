"""Compile every kernel of a forward and backward call for a GPU that is not there; print one JSON line per kernel.

    python compile_for_gpu.py ARCHITECTURE '{"grid": [16, 28, 52], "dim": 128, …}'         VMonarch
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "rank": 9, "dim": 128, …}'    FlashBias
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "dim": 16, "width": 64, …}'   linear attention
    python compile_for_gpu.py ARCHITECTURE '{"grid": [4, 8, 8], "window": [1, 2, 2], "dim": 64, …}'   windows
    python compile_for_gpu.py ARCHITECTURE '{"grid": [4, 8, 8], "tile": [2, 4, 4], "dim": 64, …}'     two resolutions
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "channels": 1536, "dim": 128, …}'   norm, rotary
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "residual": "int8", "dim": 128, …}'   residuals
    python compile_for_gpu.py ARCHITECTURE '{"tokens": 4096, "merge": true, "dim": 128, …}'       merging

A kernel launch is replaced by a compilation with the same arguments: the tensors lie on the CPU and are never read.
With "compile": false only the arguments are made, descriptors too, and the hash of what would be compiled. With "row":
32 the rows of query, key and value are 32 numbers apart, more than "dim". With "only": "_hopper_" kernels of other
names are left out. With "triton": "3.6.0" any other version of Triton is refused.
"""

import contextlib
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile

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

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from machine_code import reads_of_unwritten

from vmonarch import LatentGrid
from vmonarch.kernels.common import assembler, launch
from vmonarch.kernels.flash_bias import backward as bias_backward
from vmonarch.kernels.flash_bias import forward as bias_forward
from vmonarch.kernels.flash_entropy import backward as flash_backward
from vmonarch.kernels.flash_entropy import forward as flash_forward
from vmonarch.kernels.hopper import r_step as hopper_r_step
from vmonarch.kernels.hopper import two_resolution as hopper_two_resolution
from vmonarch.kernels.hopper.backward import keys as hopper_keys
from vmonarch.kernels.hopper.backward import rows as hopper_rows
from vmonarch.kernels.hopper.backward import two_resolution as hopper_two_resolution_backward
from vmonarch.kernels.merge import op as merge_op
from vmonarch.kernels.monarch import fused, l_step, places, r_step
from vmonarch.kernels.norm_rotary import op as norm_op
from vmonarch.kernels.residual import kernels as residual_kernels
from vmonarch.kernels.taylor import op as taylor_op
from vmonarch.kernels.two_resolution import op as two_resolution_op
from vmonarch.kernels.two_resolution.tiling import tiling_of
from vmonarch.kernels.window import op as window_op
from vmonarch.options import TwoResolutionOptions, VMonarchOptions

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

    what the assembler spills to local memory, in bytes, whether it makes asynchronous products wait, and which
    instructions read what nothing has written.
    """
    with contextlib.redirect_stdout(io.StringIO()) as report:
        binary = make_cubin(backend, ptx, metadata, options, architecture)
    spilled = re.findall(r"(\d+) bytes spill stores", report.getvalue())
    metadata["spilled"] = max(int(number) for number in spilled)
    metadata["serialized"] = "are serialized" in report.getvalue()
    metadata["unwritten"] = reads_of_unwritten(listing_of(binary)) if architecture == 90 else []
    return binary


def hash_only(kernel, key, signature, device, constexprs, options, attrs, warmup):
    """In place of a compilation: what tells it from all others."""
    return kernel.ASTSource(kernel, signature, constexprs, attrs).hash() + options.hash()


def listing_of(binary):
    """The instructions of a kernel, as the disassembler that comes with Triton writes them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)


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
                "spilled": compiled.metadata.spilled,
                "serialized": compiled.metadata.serialized,
                "unwritten": compiled.metadata.unwritten,
            }
            print(json.dumps(facts), flush=True)

        return run

    JITFunction.__getitem__ = compile_instead
    CUDABackend.make_cubin = assemble
    if not case.get("compile", True):
        JITFunction._do_compile = hash_only
    if architecture == 90:
        assert assembler.why_unsound() is None
    # Tensors on the CPU stand for those of an unknown chip, which gets the default options.
    launch._chip_name = lambda index: "unknown"
    launch.on_hopper = lambda device: architecture == 90
    originals = launch.launch_options

    def options_of_a_gpu(kernel, device, dtype, head_dim):
        return originals(kernel, torch.device("cuda"), dtype, head_dim)

    for module in (
        bias_forward,
        flash_backward,
        flash_forward,
        l_step,
        r_step,
        taylor_op,
        two_resolution_op,
        window_op,
    ):
        module.launch_options = options_of_a_gpu
    hopper = (
        hopper_keys, hopper_rows, hopper_r_step, hopper_two_resolution, hopper_two_resolution_backward
    )  # fmt: skip
    for module in (bias_forward, flash_backward, flash_forward, two_resolution_op, *hopper):
        module.processors = lambda device: 132

    with launch.launch_overrides(case.get("overrides", {})):
        launch_all(case)


def launch_all(case):
    """Forward and backward."""

    def qkv(tokens, heads):
        rows = torch.zeros(3, 1, tokens, heads, case.get("row", case["dim"]), dtype=getattr(torch, case["dtype"]))
        query, key, value = rows[..., : case["dim"]]
        return [query, key, value[..., : case.get("value_dim", case["dim"])]]

    if "rank" in case:
        dtype = getattr(torch, case["dtype"])
        tensors = qkv(case["tokens"], 2)
        factors = [torch.zeros(1, case["tokens"], 2, case["rank"], dtype=dtype) for _ in range(2)]
        mask = torch.ones(1, case["tokens"], dtype=torch.bool) if case.get("masked") else None
        call = bias_forward.Launch(*tensors, *factors, mask, case.get("scale", 0.1), case.get("causal", False))
        out, lse = bias_forward.flash_bias_forward(call)
        bias_backward.flash_bias_backward(call, out, lse, out, lse)
        return
    if "window" in case:
        tensors = qkv(math.prod(case["grid"]), 2)
        numbers = [*case["grid"], 0, *case["window"], *case["window"]]
        out, lse = window_op.window_forward(*tensors, numbers, 0.1)
        window_op.window_backward(out, lse, *tensors, out, lse, numbers, 0.1)
        return
    if "tile" in case:
        tensors = qkv(math.prod(case["grid"]), 2)
        options = TwoResolutionOptions(tile=case["tile"], cell=case.get("cell"), rest=case.get("rest", True))
        tiling = tiling_of(LatentGrid(*case["grid"]), options)
        exact = torch.zeros(1, 2, tiling.of_queries.tiles, tiling.tiles, dtype=torch.bool)
        mask = torch.ones(1, tensors[0].shape[1], dtype=torch.bool) if case.get("masked") else None
        pooled = two_resolution_op.pool(*tensors[1:], tiling, mask) if options.rest else None
        two_resolution_op.choose(*tensors[:2], tiling, options, mask, pooled)
        out, lse = tensors[2], torch.zeros(1, 2, tensors[0].shape[1])
        width = case.get("exact_tiles", 5)
        two_resolution_op.attend(*tensors, exact, width, mask, tiling, pooled, 0.1, out, lse)
        two_resolution_op.backward(out, lse, *tensors, exact, width, mask, out, lse, tiling, pooled, 0.1)
        return
    if "channels" in case:
        x = torch.zeros(1, case["tokens"], case["channels"], dtype=getattr(torch, case["dtype"]))
        angles = [torch.zeros(1, case["tokens"], 1, case["dim"]) for _ in range(2)]
        weight = torch.zeros(case["channels"])
        out = norm_op.norm_rotary_forward(x, weight, *angles, case["channels"] // case["dim"], 1e-6)
        norm_op.norm_rotary_backward(out, x, weight, *angles, 1e-6, True)
        return
    if "merge" in case:
        out_1, out_2, _ = qkv(case["tokens"], 2)
        lse = torch.zeros(1, 2, case["tokens"])
        merge_op.merge_forward(out_1, lse, out_2, lse)
        merge_op.merge_backward(out_1, lse, out_1, lse, out_2, lse, lse)
        return
    if "residual" in case:
        exact, out, _ = qkv(case["tokens"], 2)
        residual = residual_kernels.attention_residual_triton(exact, out, dtype=case["residual"])
        residual_kernels.renew_residual_triton(residual, exact, out)
        residual_kernels.add_residual_triton(out, residual)
        return
    if "width" in case:
        q, k, v = (
            torch.zeros(1, case["tokens"], 2, width, dtype=getattr(torch, case["dtype"]))
            for width in (case["dim"], case["dim"], case["width"])
        )
        numbers = (1.0, case.get("causal", False))
        out, weight, *_ = taylor_op.taylor_forward(q, k, v, None, None, None, *numbers)
        taylor_op.taylor_backward(out, None, q, k, v, None, out, weight, *numbers)
        return
    grid, coarse = LatentGrid(*case["grid"]), case.get("coarse", 1)
    tensors = qkv(grid.tokens, 1)
    options = VMonarchOptions(
        num_iterations=case.get("num_iterations", 2), coarse=coarse, exact=case["exact"],
        last_l_update=case.get("last_l_update", True),
    )  # fmt: skip
    call = fused.MonarchCall(places.grid_places(grid, coarse=coarse), options, 0.1)
    out, lse, *saved = fused.forward(*tensors, None, call, True)
    fused.backward(tensors[0], lse, *tensors, None, out, lse, tuple(saved), call)


if __name__ == "__main__":
    main()
