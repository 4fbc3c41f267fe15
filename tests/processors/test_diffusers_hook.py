"""`set_attn_processor` of diffusers: given to its pipelines, taught our processors, and how both come about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_families
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import vmonarch
from vmonarch import VMonarchProcessor

ROOT = Path(__file__).parents[2]
ORDERS = {
    "vmonarch-first": """
import sys
import vmonarch
assert not {"torch", "diffusers"} & sys.modules.keys()
from vmonarch import VMonarchProcessor
import diffusers
""",
    "diffusers-first": """
import diffusers
diffusers.WanPipeline, diffusers.ModularPipeline
from vmonarch import VMonarchProcessor, restore
import vmonarch
""",
}
LINES = """
import tiny_pipelines, tiny_wan, torch
torch.set_num_threads(1)
assert diffusers.ModularPipeline.set_attn_processor is diffusers.DiffusionPipeline.set_attn_processor
pipelines = [(tiny_wan.pipeline("t2v-2.2"), lambda pipe: tiny_wan.generate(pipe, steps=6))]
for name in ("hunyuan", "ltx", "cogvideox"):
    pipe, call = tiny_pipelines.pipeline(name)
    pipelines.append((pipe, lambda pipe, call=call: tiny_pipelines.sample(pipe, call)))
for pipe, sample in pipelines:
    assert type(pipe).__module__.startswith("diffusers."), type(pipe)
    stock = sample(pipe)
    for line in {lines!r}:
        exec(line)
        assert not torch.equal(sample(pipe), stock), (line, type(pipe))
    vmonarch.restore(pipe)
    assert torch.equal(sample(pipe), stock), type(pipe)
"""


@pytest.mark.parametrize("order", ORDERS)
def test_the_lines_of_the_readme_switch_on_stock_pipelines(order, child_environment, forks, tmp_path):
    readme = (ROOT / "README.md").read_text().splitlines()
    lines = [line for line in readme if line.startswith(("pipe.set_attn_processor(", "vmonarch.apply(pipe"))]
    assert len(lines) == 2 and lines[0].startswith("pipe.set_attn_processor(VMonarchProcessor())")
    program = tmp_path / "program.py"
    program.write_text(ORDERS[order] + LINES.format(lines=lines))
    if order == "diffusers-first":
        # They have imported diffusers already.
        code, output = forks(tmp_path, program)
    else:
        run = subprocess.run([sys.executable, program], env=child_environment, capture_output=True, text=True)
        code, output = run.returncode, run.stdout + run.stderr
    assert code == 0, output


def test_other_processors_are_handed_to_every_transformer(tiny):
    pipe, own = tiny.pipeline("t2v-2.2"), WanAttnProcessor()
    parts = tiny.transformers_of(pipe)
    pipe.set_attn_processor(own)
    assert all(processor is own for model in parts for processor in model.attn_processors.values())
    names = {name: WanAttnProcessor() for name in pipe.transformer.attn_processors}
    pipe.set_attn_processor(dict(names))
    assert [model.attn_processors for model in parts] == [names, names]
    with pytest.raises(ValueError, match="dict of processors was passed"):
        pipe.set_attn_processor({})


def test_processors_that_were_replaced_may_be_put_back(tiny):
    """diffusers does so when it unfuses projections. While none is ours, calls need no pipeline and record nothing."""
    model = tiny.transformer()
    stock = tiny.run(model)
    model.set_attn_processor(VMonarchProcessor(dense_layers=[0]))
    ours, saved = tiny.run(model), dict(model.attn_processors)
    model.set_attn_processor(WanAttnProcessor())
    model._vmonarch_record.grid = None
    assert torch.equal(tiny.run(model), stock) and model._vmonarch_record.grid is None
    model.set_attn_processor(dict(saved))
    assert torch.equal(tiny.run(model), ours) and not torch.equal(ours, stock)
    vmonarch.restore(model)
    assert torch.equal(tiny.run(model), stock)
    for given in (saved, {name: VMonarchProcessor() for name in saved}):
        with pytest.raises(ValueError, match="dictionary"):
            model.set_attn_processor(given)


def test_projections_are_fused_and_unfused_under_ours():
    tiny = tiny_families.FAMILIES["cogvideox"]
    model, inputs = tiny.make(), tiny.inputs(*tiny_families.GRID)
    run = lambda: model(**inputs, return_dict=False)[0]
    with torch.no_grad():
        stock = run()
        vmonarch.apply(model, VMonarchProcessor(exact=None, dense_layers=[0]))
        ours = run()
        model.fuse_qkv_projections()
        torch.testing.assert_close(run(), ours)
        # Another is applied meanwhile, and stays.
        vmonarch.apply(model, VMonarchProcessor())
        other = run()
        model.unfuse_qkv_projections()
        torch.testing.assert_close(run(), other)
        assert not any("Fused" in type(it).__name__ for it in model.attn_processors.values())
        assert (other - ours).abs().max() > 1e-4
        model.fuse_qkv_projections()
        vmonarch.restore(model)
        model.unfuse_qkv_projections()
        assert torch.equal(run(), stock)


def test_under_a_cp_plan_of_ours_no_other_processor_is_taken():
    tiny = tiny_families.FAMILIES["cogvideox"]
    model = tiny.make()
    vmonarch.apply(model, VMonarchProcessor())
    before = dict(model.attn_processors)
    model._parallel_config = SimpleNamespace(context_parallel_config=object())
    stock = next(iter(before.values())).original
    for given in (stock, dict.fromkeys(before, stock)):
        with pytest.raises(RuntimeError, match="cannot be restored under context parallelism"):
            model.set_attn_processor(given)
    assert model.attn_processors == before


@pytest.mark.parametrize("options", [{"refresh": 2}, {"dense_steps": 0.5}], ids=lambda it: next(iter(it)))
def test_the_transformer_of_a_pipeline_takes_what_apply_takes(tiny, options):
    pipe = tiny.pipeline("t2v")
    found = [tiny.quickly(pipe, 4)]
    for switch_on in (lambda it: vmonarch.apply(pipe, it), lambda it: pipe.transformer.set_attn_processor(it)):
        switch_on(VMonarchProcessor(**options))
        found.append(tiny.quickly(pipe, 4))
        pipe.transformer.set_attn_processor(None)
        assert torch.equal(tiny.quickly(pipe, 4), found[0])
    assert torch.equal(found[1], found[2]) and not torch.equal(found[0], found[1])


def test_what_a_transformer_alone_does_not_tell_needs_its_pipeline(tiny):
    pipe = tiny.pipeline("t2v-2.2")
    for target in (pipe, pipe.transformer):
        with pytest.raises(TypeError, match="presets are for.* vmonarch.apply"):
            target.set_attn_processor("fast")
    heads = [["a"] * pipe.transformer.config.num_attention_heads] * pipe.transformer.config.num_layers
    plan = vmonarch.AttentionPlan({"a": vmonarch.VMonarchOptions()}, {"transformer": heads, "transformer_2": heads})
    with pytest.raises(ValueError, match="plan: it is for transformer, transformer_2, .* vmonarch.apply"):
        pipe.transformer_2.set_attn_processor(VMonarchProcessor(plan=plan))
    pipe.set_attn_processor(VMonarchProcessor(plan=plan))
