"""Together with the rest of diffusers: offloading, LoRA, fused projections, checkpointing, caches, torch.compile."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import diffusers
import pytest
import torch
from tiny_families import FAMILIES, first
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import vmonarch
from vmonarch import VMonarchProcessor


@pytest.mark.parametrize("when", ["before", "after"])
def test_fused_projections(tiny, when):
    model = tiny.transformer()
    stock = tiny.run(model)
    vmonarch.apply(model, VMonarchProcessor())
    expected = tiny.run(model)
    if when == "before":
        vmonarch.restore(model)
        model.fuse_qkv_projections()
        vmonarch.apply(model, VMonarchProcessor())
    else:
        model.fuse_qkv_projections()
    assert hasattr(model.blocks[0].attn1, "to_qkv")
    model.blocks[0].attn1.to_q.weight.data.zero_()  # no longer used
    torch.testing.assert_close(tiny.run(model), expected, rtol=1e-5, atol=1e-6)
    vmonarch.restore(model)
    torch.testing.assert_close(tiny.run(model), stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after"])
def test_lora_loaded_fused_and_unloaded(tiny, when, tmp_path):
    save_lora(tiny, tmp_path)
    pipe = tiny.pipeline("t2v")
    close = {"rtol": 1e-4, "atol": 1e-4}
    vmonarch.apply(pipe, VMonarchProcessor())
    without = tiny.generate(pipe)
    if when == "before":
        vmonarch.restore(pipe)
    pipe.load_lora_weights(tmp_path)
    if when == "before":
        stock = tiny.generate(pipe)
        vmonarch.apply(pipe, VMonarchProcessor())
    with_lora = tiny.generate(pipe)
    assert (with_lora - without).abs().max() > 1e-2
    pipe.fuse_lora()
    torch.testing.assert_close(tiny.generate(pipe), with_lora, **close)
    pipe.unfuse_lora()
    if when == "before":
        vmonarch.restore(pipe)
        torch.testing.assert_close(tiny.generate(pipe), stock, **close)
        assert (stock - with_lora).abs().max() > 1e-2
        vmonarch.apply(pipe, VMonarchProcessor())
    pipe.unload_lora_weights()
    torch.testing.assert_close(tiny.generate(pipe), without, **close)


def save_lora(tiny, folder):
    """Layers that change the video, as a file of diffusers."""
    from peft import get_peft_model_state_dict

    donor = tiny.pipeline("t2v")
    tiny.add_lora(donor.transformer)
    layers = {name: 3 * weight for name, weight in get_peft_model_state_dict(donor.transformer).items()}
    donor.save_lora_weights(folder, transformer_lora_layers=layers)


def merged(tiny, model, weights, **shape):
    """A plain model with the LoRA layers of `model`, times `weights`, in its weights."""
    twin = tiny.transformer(**shape)
    layers = dict(model.named_modules())
    for path, linear in twin.named_modules():
        for name, weight in weights.items() if hasattr(layers[path], "lora_A") else ():
            down, up = (getattr(layers[path], part)[name].weight for part in ("lora_A", "lora_B"))
            linear.weight.data += weight * 3 / 2 * up @ down
    return twin


@pytest.mark.parametrize("when", ["before", "after"])
def test_two_weighted_lora_adapters_equal_merged_weights(tiny, when):
    model, plain = tiny.transformer(), tiny.transformer()
    vmonarch.apply(plain, VMonarchProcessor())
    without = tiny.run(plain)
    if when == "after":
        vmonarch.apply(model, VMonarchProcessor())
    for seed, name in enumerate("ab", 1):
        tiny.add_lora(model, seed=seed, adapter_name=name)
    if when == "before":
        vmonarch.apply(model, VMonarchProcessor())
    close = {"rtol": 1e-4, "atol": 1e-5}
    for weights in ({"a": 0.5, "b": 2.0}, {"b": 1.0}):
        model.set_adapters(list(weights), list(weights.values()))
        twin = merged(tiny, model, weights)
        vmonarch.apply(twin, VMonarchProcessor())
        torch.testing.assert_close(tiny.run(model), tiny.run(twin), **close)
        assert (tiny.run(twin) - without).abs().max() > 1e-2
    half = merged(tiny, model, {"b": 0.25})
    vmonarch.apply(half, VMonarchProcessor())
    with torch.no_grad():
        scaled = model(**tiny.inputs(), attention_kwargs={"scale": 0.25})[0]
    torch.testing.assert_close(scaled, tiny.run(half), **close)
    model.disable_lora()
    assert torch.equal(tiny.run(model), without)
    model.enable_lora()
    torch.testing.assert_close(tiny.run(model), tiny.run(twin), **close)


def test_compiled_with_lora(tiny, dynamo):
    model = tiny.applied_transformer(num_layers=3)
    tiny.add_lora(model, adapter_name="a")
    expected = merged(tiny, model, {"a": 1.0}, num_layers=3)
    vmonarch.apply(expected, VMonarchProcessor())
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(tiny.run(model), tiny.run(expected), rtol=1e-4, atol=1e-5)
    assert dynamo["stats"]["unique_graphs"] == 1 and not dynamo["graph_break"]


def test_lora_of_either_transformer(tiny, tmp_path):
    save_lora(tiny, tmp_path)
    pipe = tiny.applied("t2v-2.2", dense_steps=1)
    outputs = [tiny.generate(pipe)]
    for second in (False, True):
        pipe.load_lora_weights(tmp_path, adapter_name=f"style-{second}", load_into_transformer_2=second)
        outputs.append(tiny.generate(pipe))
        assert (outputs[-1] - outputs[-2]).abs().max() > 1e-3
    pipe.unload_lora_weights()
    torch.testing.assert_close(tiny.generate(pipe), outputs[0], rtol=1e-4, atol=1e-4)
    vmonarch.restore(pipe)
    assert torch.equal(tiny.generate(pipe), tiny.generate(tiny.pipeline("t2v-2.2")))


def gradients(model, batches, checkpointing):
    model.train()
    model.zero_grad()
    model.enable_gradient_checkpointing() if checkpointing else model.disable_gradient_checkpointing()
    outputs = [first(model(**inputs)) for inputs in batches]
    # Backward only after every forward: by then the transformer has seen another grid.
    sum((output * output.detach().cos()).sum() for output in outputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    "grids", [[(3, 2, 3)], [(3, 2, 4), (4, 2, 3)], [(3, 2, 4), (2, 3, 3)]], ids=["one", "same-size", "other-size"]
)
def test_gradient_checkpointing_gives_the_same_gradients(tiny, grids):
    model = tiny.transformer()
    vmonarch.apply(model, VMonarchProcessor())
    batches = [tiny.inputs(grid, batch=2) for grid in grids]
    expected = gradients(model, batches, False)
    actual = gradients(model, batches, True)
    assert expected.keys() == actual.keys() and "blocks.0.attn1.to_q.weight" in expected
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-5, atol=1e-6)
    vmonarch.restore(model)
    stock = gradients(model, batches, False)["blocks.0.attn1.to_q.weight"]
    assert not torch.allclose(stock, expected["blocks.0.attn1.to_q.weight"], rtol=1e-3)


def test_reentrant_checkpointing_with_interleaved_grids(tiny):
    model = tiny.applied_transformer()
    batches = [tiny.inputs(grid) for grid in ((3, 2, 4), (4, 2, 3))]
    for inputs in batches:
        inputs["hidden_states"].requires_grad_()
    expected = gradients(model, batches, False)
    model.enable_gradient_checkpointing()
    model._gradient_checkpointing_func = lambda block, *inputs: torch.utils.checkpoint.checkpoint(
        block, *inputs, use_reentrant=True
    )
    model.zero_grad()
    outputs = [model(**inputs)[0] for inputs in batches]
    sum((output * output.detach().cos()).sum() for output in outputs).backward()
    for name, parameter in model.named_parameters():
        if name in expected:
            torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-6)


def test_checkpointing_through_a_run_with_dense_steps(tiny, dynamo):
    pipe = tiny.applied("t2v", dense_steps=1)
    model, found = pipe.transformer.train(), []
    sample = type(pipe).__call__.__wrapped__  # past its no_grad

    def backward():
        model.zero_grad()
        video = sample(
            pipe, tiny.PROMPT, height=tiny.HEIGHT, width=tiny.WIDTH, num_frames=tiny.FRAMES, num_inference_steps=2,
            guidance_scale=1.0, output_type="latent", generator=torch.Generator().manual_seed(0),
        ).frames  # fmt: skip
        video.square().sum().backward()

    for checkpointing in (False, True):
        model.enable_gradient_checkpointing() if checkpointing else model.disable_gradient_checkpointing()
        backward()
        found.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6)
    model.disable_gradient_checkpointing()
    blocks = {*model.blocks}
    apply_activation_checkpointing(model, check_fn=lambda module: module in blocks)
    for compiled in (False, True):
        if compiled:
            model.compile_repeated_blocks(backend="eager")
        with pytest.raises(RuntimeError, match="(?s)needs the grid.*enable_gradient_checkpointing"):
            backward()


@pytest.mark.parametrize("when", ["before", "after"])
def test_restore_leaves_the_checkpointing_function_as_it_was(tiny, when):
    model = tiny.transformer()
    checkpoint = lambda block, *inputs: torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=False)
    if when == "before":
        model.enable_gradient_checkpointing(checkpoint)
    # A second processor takes the place of the first.
    for coarse in (1, 2):
        vmonarch.apply(model, VMonarchProcessor(coarse=coarse))
        model.enable_gradient_checkpointing(checkpoint)
        model(**tiny.inputs())[0].sum().backward()
        assert model._gradient_checkpointing_func.checkpoint is checkpoint
    vmonarch.restore(model)
    assert model._gradient_checkpointing_func is checkpoint


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


@pytest.mark.parametrize("options", [{}, {"refresh": 1}], ids=["apply", "refresh"])
@pytest.mark.parametrize("offload", ["block_level", "leaf_level", "sequential", "model"])
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


@pytest.mark.parametrize("build", ["transformer", "vace_transformer"])
def test_compiled_whole_without_graph_break_or_recompilation(tiny, dynamo, build):
    shape = {"num_layers": 1, "vace_layers": [0]} if build.startswith("vace") else {}
    model = getattr(tiny, build)(**shape)
    inputs = tiny.inputs()
    if build.startswith("vace"):
        inputs["control_hidden_states"] = torch.randn(1, 96, 3, 4, 6)
    vmonarch.apply(model, VMonarchProcessor())
    tiny.check_one_graph(model, dynamo, whole=True, given=inputs)


def test_compiled_repeated_blocks_share_one_graph(tiny, dynamo):
    tiny.check_one_graph(tiny.applied_transformer(num_layers=4), dynamo)


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_compiled_on_another_grid(tiny, dynamo, scope):
    model = tiny.applied_transformer(num_layers=1)
    # A whole model takes seconds for each grid.
    grids = [(3, 2, 4), (4, 2, 3), *([] if scope == "whole" else [(2, 3, 3)]), (3, 2, 4)]
    expected = [tiny.run(model, grid) for grid in grids]
    if scope == "whole":
        compiled = torch.compile(model, backend="eager", fullgraph=True)
    else:
        compiled = model
        model.compile_repeated_blocks(backend="eager", fullgraph=True)
    for grid, output in zip(grids, expected, strict=True):
        torch.testing.assert_close(tiny.run(compiled, grid), output)
    assert not dynamo["graph_break"]


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_compiled_pipeline_with_dense_steps_switched_off_again(tiny, dynamo, scope):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=1)
    stock = tiny.generate(pipe, steps=6)
    vmonarch.apply(pipe, VMonarchProcessor(dense_steps=2))
    expected = tiny.generate(pipe, steps=6)
    if scope == "whole":
        pipe.transformer.compile(backend="eager")
    else:
        pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=True)
    torch.testing.assert_close(tiny.generate(pipe, steps=6), expected)
    graphs = dynamo["stats"]["unique_graphs"]
    assert graphs <= 4, "the step must not be compiled in, only whether it is dense"
    torch.testing.assert_close(tiny.generate(pipe, steps=6), expected)
    assert dynamo["stats"]["unique_graphs"] == graphs
    vmonarch.restore(pipe)
    torch.testing.assert_close(tiny.generate(pipe, steps=6), stock)


@pytest.mark.parametrize("scope", ["wrapped", "in place"])
@pytest.mark.parametrize("option", ["dense_steps", "refresh"])
def test_whole_in_one_graph_no_step_is_known(tiny, dynamo, scope, option):
    pipe = tiny.applied("t2v", **{option: 2})
    if scope == "wrapped":
        pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    else:
        pipe.transformer.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"(?s){option}.*compile_repeated_blocks"):
        tiny.generate(pipe)


def test_compiled_blocks_of_two_threads_are_told_apart(tiny, dynamo):
    model = tiny.applied_transformer(num_layers=1)
    # As many tokens in both: nothing but the grid tells them apart.
    grids = [(3, 2, 4), (4, 3, 2)]
    expected = [tiny.run(model, grid) for grid in grids]
    model.compile_repeated_blocks(backend="eager", fullgraph=True)
    for grid in grids:
        tiny.run(model, grid)
    begun, together = [], threading.Barrier(2, timeout=60)
    model.condition_embedder.register_forward_hook(lambda *_: begun.append(together.wait()))
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda grid: tiny.run(model, grid), grids))
    assert len(begun) == 2, "both calls had begun before either reached its block"
    for output, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(output, wanted)


def test_applied_to_an_already_compiled_and_used_transformer(tiny, dynamo):
    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=1)
    stock = tiny.generate(pipe)
    with vmonarch.apply(pipe, VMonarchProcessor()):
        expected = tiny.generate(pipe)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager", fullgraph=True)
    torch.testing.assert_close(tiny.generate(pipe), stock)
    vmonarch.apply(pipe, VMonarchProcessor())
    torch.testing.assert_close(tiny.generate(pipe), expected)
    vmonarch.restore(pipe)
    torch.testing.assert_close(tiny.generate(pipe), stock)


def test_compiled_without_a_grid_says_what_to_do(tiny, dynamo):
    compiled = torch.compile(tiny.applied_transformer().forward, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"(?s)needs the grid.*call the transformer itself.*grid="):
        compiled(**tiny.inputs())


@pytest.mark.slow
def test_compiled_by_inductor(tiny, dynamo):
    model = tiny.applied_transformer(num_layers=1)
    expected = tiny.run(model)
    # A pool of processes would take longer to start than it saves.
    model.compile_repeated_blocks(fullgraph=True, options={"compile_threads": 1})
    torch.testing.assert_close(tiny.run(model), expected, rtol=1e-4, atol=1e-4)
    assert dynamo["inductor"]


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["vmonarch", "dense-steps", "refresh", "plan", "plan-of-two-layers"])
def test_cuda_graphs_of_repeated_blocks(tiny, dynamo, attention):
    from torch._inductor.cudagraph_trees import get_manager

    from vmonarch.kernels.flash_entropy.segments import row_work
    from vmonarch.kernels.hopper.schedule import even_order, schedule
    from vmonarch.kernels.monarch.call import exact_table_of

    pipe = tiny.pipeline("t2v")
    pipe.transformer = tiny.transformer(num_layers=6 if attention == "plan" else 2, num_attention_heads=3)
    pipe.to("cuda")
    options = {
        "vmonarch": {},
        "dense-steps": {"dense_steps": 2},
        # One operator for all steps, which is not recorded.
        "refresh": {"refresh": [0, 2]},
        # Layers that all differ: one operator for them, which is not recorded.
        "plan": {
            "plan": vmonarch.AttentionPlan(
                {str(n): {"num_iterations": n} for n in (1, 2, 3)},
                {"transformer": [[a, b, a] for a in "123" for b in "12"]},
            )
        },
        "plan-of-two-layers": {
            "plan": vmonarch.AttentionPlan(
                {"t1": {"num_iterations": 1}, "own": {"exact": {"band": 0}}},
                {"transformer": [["t1", "own", "t1"], ["own", "t1", "own"]]},
            )
        },
    }
    vmonarch.apply(pipe, VMonarchProcessor(**options[attention]))
    expected = tiny.generate(pipe, steps=5)
    vmonarch.apply(pipe, VMonarchProcessor(**options[attention]))
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


@pytest.mark.parametrize("grids", [[(3, 2, 3)], [(3, 2, 4), (4, 2, 3)]], ids=["one", "same-size"])
def test_compiled_training_step_with_checkpointing(tiny, dynamo, grids):
    model = tiny.applied_transformer()
    batches = [tiny.inputs(grid, batch=2) for grid in grids]
    expected = gradients(model, batches, False)
    model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
    actual = gradients(model, batches, True)
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5)


def test_layerwise_casting(tiny):
    model = tiny.applied_transformer()
    expected = tiny.run(model)
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    torch.testing.assert_close(tiny.run(model), expected, rtol=0.05, atol=0.05)


def test_ema_style_copies_and_state_dicts_have_no_extra_keys(tiny):
    model = tiny.transformer()
    keys = list(model.state_dict())
    vmonarch.apply(model, VMonarchProcessor())
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == [name for name, _ in tiny.transformer().named_modules()]
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(tiny.run(twin), tiny.run(model))


def test_saved_transformers_load_as_stock(tiny, tmp_path):
    model = tiny.transformer()
    stock = tiny.run(model)
    vmonarch.apply(model, VMonarchProcessor())
    expected = tiny.run(model)
    model.save_pretrained(tmp_path)
    loaded = diffusers.WanTransformer3DModel.from_pretrained(tmp_path)
    torch.testing.assert_close(tiny.run(loaded), stock)
    vmonarch.apply(loaded, VMonarchProcessor())
    torch.testing.assert_close(tiny.run(loaded), expected)
