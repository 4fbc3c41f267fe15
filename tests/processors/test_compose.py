"""Together with the rest of diffusers: offloading, LoRA, fused projections, checkpointing, caches, torch.compile."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from peft import LoraConfig, get_peft_model_state_dict
from tiny_families import FAMILIES, first
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import vmonarch
from vmonarch import ExactBlocks, VMonarchProcessor
from vmonarch.attend import Exact
from vmonarch.call import Call
from vmonarch.engines import CUDNN
from vmonarch.grid import LatentGrid


def test_weighted_lora_adapters_of_either_transformer(tiny, tmp_path):
    """With all blocks exact ours is the stock processor, whatever LoRA makes of the projections."""
    save_lora(tiny, tmp_path)
    pipe, videos = tiny.pipeline("t2v-2.2"), []
    for name, second in (("a", False), ("b", True)):
        pipe.load_lora_weights(tmp_path, adapter_name=name, load_into_transformer_2=second)
    for weights in ([0.5, 1.5], [1.5, 1.5], [1.5, 0.5]):
        pipe.set_adapters(["a", "b"], weights)
        videos.append(tiny.generate(pipe))
        with vmonarch.apply(pipe, VMonarchProcessor(exact=ExactBlocks(band=2))):
            torch.testing.assert_close(tiny.generate(pipe), videos[-1], rtol=1e-4, atol=1e-4)
    assert all((one - other).abs().max() > 1e-2 for one, other in itertools.combinations(videos, 2))


def save_lora(tiny, folder):
    """Layers that change the video, as a file of diffusers."""
    donor = tiny.pipeline("t2v")
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    torch.manual_seed(0)
    donor.transformer.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    layers = {name: 3 * weight for name, weight in get_peft_model_state_dict(donor.transformer).items()}
    donor.save_lora_weights(folder, transformer_lora_layers=layers)


def gradients(model, batches, checkpointing):
    model.train()
    model.zero_grad()
    if checkpointing is not None:
        model.enable_gradient_checkpointing() if checkpointing else model.disable_gradient_checkpointing()
    outputs = [first(model(**inputs)) for inputs in batches]
    # Backward only after every forward: by then the transformer has seen another grid.
    sum((output * output.detach().cos()).sum() for output in outputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


SAME_SIZE = [(3, 2, 4), (4, 2, 3)]


@pytest.mark.parametrize(
    "compiled, grids",
    [(False, SAME_SIZE), (False, [(3, 2, 4), (2, 3, 3)]), (True, SAME_SIZE)],
    ids=["same-size", "other-size", "compiled_training_step"],
)
def test_gradient_checkpointing_gives_the_same_gradients(tiny, dynamo, compiled, grids):
    model = tiny.applied_transformer()
    batches = [tiny.inputs(grid, batch=2) for grid in grids]
    expected = gradients(model, batches, False)
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    actual = gradients(model, batches, True)
    assert expected.keys() == actual.keys() and "blocks.0.attn1.to_q.weight" in expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5)


def test_reentrant_checkpoints_are_computed_again_in_their_own_call(tiny):
    model = tiny.applied_transformer()
    batches = [tiny.inputs(grid) for grid in SAME_SIZE]
    for inputs in batches:
        inputs["hidden_states"].requires_grad_()
    expected = gradients(model, batches, False)
    model.enable_gradient_checkpointing(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True))
    actual = gradients(model, batches, None)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.deep)], ids=["eager", "compiled"])
def test_checkpoints_of_others_carry_no_call(dynamo, compiled):
    case = FAMILIES["hunyuan"]
    model = case.make()
    vmonarch.apply(model, VMonarchProcessor())
    blocks = {*model.transformer_blocks, *model.single_transformer_blocks}
    if compiled:
        model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    with pytest.raises(RuntimeError, match="(?s)needs the grid.*enable_gradient_checkpointing"):
        gradients(model, [case.call()], False)


@pytest.mark.parametrize(
    "options, offload",
    [({}, "block_level"), ({"refresh": 1}, "leaf_level"), ({}, "sequential"), ({"refresh": 1}, "model")],
)
def test_offloading_on_the_cpu(tiny, options, offload):
    # What a machine without an accelerator can show: the hooks of diffusers and accelerate that move weights and
    # inputs are all in place and run. `test_offloading_on_the_gpu` moves them to a device.
    pipe = tiny.pipeline("t2v")
    stock = tiny.generate(pipe)
    vmonarch.apply(pipe.transformer, VMonarchProcessor(**options))
    expected = tiny.generate(pipe)
    tiny.offload(pipe.transformer, offload)
    assert torch.equal(tiny.generate(pipe), expected)
    assert torch.equal(tiny.generate(pipe, width=64), tiny.generate(pipe, width=64))
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), stock)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind, options", [("t2v-2.2", {"dense_steps": 1}), ("i2v-2.1", {"dense_steps": 1, "refresh": [1]})]
)
@pytest.mark.parametrize("offload", ["model", "sequential", "block_level", "leaf_level", "stream"])
def test_offloading_on_the_gpu(tiny, kind, options, offload):
    pipe = tiny.pipeline(kind).to("cuda")
    stock = tiny.generate(pipe)
    vmonarch.apply(pipe, VMonarchProcessor(**options))
    expected = tiny.generate(pipe)
    tiny.offload_from_gpu(pipe, offload)
    for _ in range(2):
        torch.testing.assert_close(tiny.generate(pipe), expected, rtol=1e-3, atol=1e-3)
    vmonarch.restore(pipe)
    torch.testing.assert_close(tiny.generate(pipe), stock, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{"dense_steps": [1]}, {"refresh": [0, 1]}], ids=lambda options: next(iter(options))
)
def test_the_hook_and_the_steps_never_wait_for_the_gpu(tiny, options):
    pipe = tiny.pipeline("t2v").to("cuda")
    vmonarch.apply(pipe, VMonarchProcessor(**options))
    tiny.generate(pipe)
    waiting = torch.cuda.set_sync_debug_mode
    pipe.transformer.register_forward_pre_hook(lambda *_: waiting("error"), prepend=True)
    pipe.transformer.register_forward_pre_hook(lambda *_: waiting("default"))
    try:
        tiny.generate(pipe)
    finally:
        waiting("default")


@pytest.mark.gpu
def test_exact_attention_by_cudnn_is_that_of_diffusers_bit_by_bit():
    qkv = torch.randn(3, 2, 300, 4, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    out, _ = Exact()(*qkv, Call(LatentGrid(3, 10, 10), backend=CUDNN))
    assert torch.equal(out, dispatch_attention_fn(*qkv, backend=CUDNN))


@pytest.mark.parametrize("whole", [False, True], ids=["repeated-blocks", "whole"])
def test_compiled_it_is_one_graph(tiny, dynamo, whole):
    model, given = tiny.applied_transformer(num_layers=1 if whole else 2), tiny.inputs()
    with torch.no_grad():
        expected = model(**given)[0]
        if whole:
            model = torch.compile(model, backend="eager", fullgraph=True)
        else:
            model.compile_repeated_blocks(backend="eager", fullgraph=True)
        for _ in range(3):
            torch.testing.assert_close(model(**given)[0], expected)
    assert dynamo["stats"]["unique_graphs"] == 1 and not dynamo["graph_break"]


def test_compiled_pipeline_with_dense_steps_switched_off_again(tiny, dynamo):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=1)
    stock = tiny.generate(pipe, steps=6)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=2))
    expected = tiny.generate(pipe, steps=6)
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(tiny.generate(pipe, steps=6), expected)
    graphs = dynamo["stats"]["unique_graphs"]
    assert graphs <= 4, "the step must not be compiled in, only whether it is dense"
    torch.testing.assert_close(tiny.generate(pipe, steps=6), expected)
    assert dynamo["stats"]["unique_graphs"] == graphs
    vmonarch.restore(pipe)
    torch.testing.assert_close(tiny.generate(pipe, steps=6), stock)


@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_whole_in_one_graph_no_step_is_known(tiny, dynamo, option):
    pipe = tiny.applied("t2v", **{option: 2})
    pipe.transformer.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){option}.*compile_repeated_blocks"):
        tiny.generate(pipe)


def plan_of(layers):
    methods = {str(n): {"num_iterations": n} for n in (1, 2, 3)} | {"own": {"exact": {"band": 0}}}
    return {"plan": vmonarch.AttentionPlan(methods, {"transformer": layers})}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dense_steps": 2},
        # One operator for all steps, which is not recorded.
        {"refresh": [0, 2]},
        # Layers that all differ: one operator for them, which is not recorded.
        plan_of([[a, b, a] for a in ("1", "2", "3") for b in ("1", "2")]),
        plan_of([["1", "own", "1"], ["own", "1", "own"]]),
    ],
    ids=["vmonarch", "dense-steps", "refresh", "plan", "plan-of-two-layers"],
)
def test_cuda_graphs_of_repeated_blocks(tiny, dynamo, options):
    from torch._inductor.cudagraph_trees import get_manager

    from vmonarch.kernels.flash_entropy.segments import row_work
    from vmonarch.kernels.hopper.schedule import even_order, schedule
    from vmonarch.kernels.monarch.call import exact_table_of

    pipe = tiny.pipeline("t2v")
    layers = len(options["plan"].layers["transformer"]) if "plan" in options else 2
    pipe.transformer = tiny.transformer(num_layers=layers, num_attention_heads=3)
    pipe.to("cuda")
    vmonarch.apply(pipe, VMonarchProcessor(**options))
    expected = tiny.generate(pipe, steps=5)
    vmonarch.apply(pipe, VMonarchProcessor(**options))
    # As in a new process, where the tables that are kept are made while the first graph is.
    for kept in (row_work, exact_table_of, schedule, even_order):
        kept.cache_clear()
    pipe.transformer.compile_repeated_blocks(fullgraph=True, mode="reduce-overhead")
    # The output of one block is the input of the next: all of a forward call belong to one round of graphs.
    pipe.transformer.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    for _ in range(3):
        torch.testing.assert_close(tiny.generate(pipe, steps=5), expected, rtol=1e-3, atol=1e-3)
    manager = get_manager(0, create_if_none_exists=False)
    assert manager is not None and any(manager.roots.values()), "nothing was recorded"
    assert not dynamo["graph_break"]
