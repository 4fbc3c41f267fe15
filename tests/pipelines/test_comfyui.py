"""VMonarch at ComfyUI's seam for attention, against a stand-in of it; `test_comfyui_engine.py` runs ComfyUI itself."""

import asyncio
import importlib.util
import json
import logging
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comfyui_stand_in import (
    CALLBACKS,
    GRID,
    KEY,
    WRAPPERS,
    HunyuanVideo,
    LTXVModel,
    Patcher,
    WanModel,
    by_heads,
    exact,
    sampling,
)
from packaging.requirements import Requirement

import vmonarch
from vmonarch import VMonarchOptions, int8_attention, vmonarch_attention
from vmonarch.attend import Beside, Exact, Op
from vmonarch.call import Call
from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.kernels.residual.api import add_residual, attention_residual
from vmonarch.pipelines import comfyui
from vmonarch.pipelines.comfyui.override import PRESETS, OverrideAttention, step_of

FOLDER = Path(comfyui.__file__).resolve().parent
SCHEDULE = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0]
# Of eight steps 28 %.
DUE = (0, 1, 4)


def patched(model, **settings):
    patcher = Patcher(model).clone()
    seam = OverrideAttention(**({} if "preset" in settings else {"refresh": "0.28"}) | settings)
    seam.install(patcher, CALLBACKS, WRAPPERS)
    return patcher, seam


def inputs(model, block, sigma, prompts, beside=0):
    """Query, key and value [B, S, H, D] of a block's self-attention."""
    return [by_heads(model.tokens(block, sigma, prompts, name, GRID.tokens + beside)) for name in "qkv"]


def ours(model, block, sigma, prompts, **options):
    return vmonarch_attention(*inputs(model, block, sigma, prompts), grid=GRID, options=VMonarchOptions(**options))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("calls", [[("cond", "uncond")], [("uncond",), ("cond",)]], ids=["in-one-call", "one-by-one"])
@pytest.mark.parametrize("kind", [WanModel, LTXVModel])
def test_every_guidance_branch_has_its_residuals(calls, kind):
    # Both layouts of heads at the seam.
    model = kind(twice=(1,), apart=kind is LTXVModel)
    patcher, seam = patched(model)
    blocks = [(*model.lists, 0, 0), (*model.lists, 1, 0), (*model.lists, 1, 1)]
    residuals = {}
    with sampling(patcher, SCHEDULE) as ask:
        for step, sigma in enumerate(SCHEDULE[:-1]):
            for prompts in calls:
                for block, out in zip(blocks, ask(sigma, prompts), strict=True):
                    true, rough = (
                        exact(*inputs(model, block, sigma, prompts)),
                        ours(model, block, sigma, prompts, num_iterations=1, exact=None),
                    )
                    if step in DUE:
                        residuals[prompts, block] = attention_residual(true, rough)
                        close(out, true)
                    else:
                        close(out, add_residual(rough, residuals[prompts, block]))
    report = seam.report
    assert (report.attended, report.exact) == (8 * 3 * len(calls), 3 * 3 * len(calls))
    assert (list(report.schedule.exact), report.steps, len(report.branches)) == ([*DUE], 8, len(calls))


# As ComfyUI flips a schedule, in unsampling.
RISING = [1e-4, *reversed(SCHEDULE[:-1])]
# Heun's method calls the model at a level, then at the next one.
HEUN = [sigma for pair in zip(SCHEDULE[:-2], SCHEDULE[1:-1], strict=True) for sigma in pair] + [SCHEDULE[-2]]


@pytest.mark.parametrize("schedule, asked", [(SCHEDULE, HEUN), (RISING, RISING[:-1])], ids=["heun", "rising"])
def test_every_step_that_is_due_renews_residuals_once(schedule, asked):
    patcher, seam = patched(WanModel(blocks=1))
    with sampling(patcher, schedule) as ask:
        for sigma in asked:
            ask(sigma)
    report = seam.report
    assert (report.attended, report.exact, list(report.schedule.exact)) == (len(asked), len(DUE), [*DUE])


def test_exact_steps_after_the_first_are_in_eight_bits():
    model = WanModel(blocks=1)
    patcher, seam = patched(model, refresh='steps=0.5, precision="int8"')
    with sampling(patcher, SCHEDULE) as ask:
        for step, sigma in enumerate(SCHEDULE[:-1]):
            out = ask(sigma)[0]
            tensors = inputs(model, (*model.lists, 0, 0), sigma, ("cond", "uncond"))
            if step in (0, 1, 2, 4):
                close(out, exact(*tensors) if step < 1 else int8_attention(*tensors))
    assert list(seam.report.schedule.exact) == [0, 1, 2, 4]


class Smooth(WanModel):
    """Its output moves along a parabola, which a prompt shifts; `computed` are the noise levels of its calls."""

    def __init__(self, bend):
        super().__init__(blocks=1)
        self.bend, self.computed = bend, []

    def _forward(self, x, timestep, context, clip_fea=None, time_dim_concat=None, transformer_options=None):
        super()._forward(x, timestep, context, transformer_options=transformer_options)
        self.computed.append(float(timestep[0]))
        return self.output(self.computed[-1], transformer_options["uuids"])

    def output(self, sigma, prompts):
        return torch.stack([torch.tensor([sigma, 2.0 - self.bend * sigma**2, 3.0 + len(prompt)]) for prompt in prompts])


LONG = [(1 - step / 20) ** 0.8 for step in range(21)]


@pytest.mark.parametrize("calls", [[("cond", "uncond")], [("uncond",), ("cond",)]], ids=["in-one-call", "one-by-one"])
@pytest.mark.parametrize("refresh", ["steps=1.0, cache=0.02", "tolerance=3, cache=0.02"])
def test_outputs_are_predicted_along_the_line_through_the_latest_two(calls, refresh):
    model = Smooth(bend=1)
    patcher, seam = patched(model, refresh=refresh, end_percent=0.8)
    last = {prompts: [] for prompts in calls}
    with sampling(patcher, LONG) as ask:
        for sigma in LONG[:-1]:
            for prompts in calls:
                before = len(model.computed)
                found, points = ask(sigma, prompts), last[prompts]
                if len(model.computed) > before:
                    last[prompts] = [*points[-1:], sigma]
                    close(found, model.output(sigma, prompts))
                else:
                    first, second = points
                    line = torch.lerp(*(model.output(x, prompts) for x in points), (sigma - first) / (second - first))
                    close(found, line)
                    assert (found - model.output(sigma, prompts)).norm() < 0.03 * found.norm()
    predicted = seam.report.schedule.predicted
    assert len(model.computed) == len(calls) * (20 - len(predicted)) and len(predicted) > 6
    assert f"Predicted steps: {min(predicted)}, " in str(seam.report)
    # Outside of the part of the schedule in which the preset is used, all is computed.
    assert LONG[max(predicted)] > 0.2 > LONG[19]


def test_the_step_is_that_of_the_level_before():
    for sigma, step in ((1.2, 0), (0.95, 0), (0.9, 1), (0.9 + 1e-6, 1), (0.3, 6), (0.2, 7), (0.01, 7)):
        assert step_of(sigma, SCHEDULE) == step
        assert step_of(1.2 - sigma, [1.2 - level for level in SCHEDULE]) == step
        assert step_of(sigma, [*SCHEDULE, *SCHEDULE]) is None


class Subclass(WanModel):
    """It may attend more often than once in a block."""


# What is said: the model, the settings, what the sampler tells, what the call has.
REASONS = {
    "with a mask": (WanModel(named={"mask": torch.zeros(1, 1, 1, GRID.tokens)}), {}, {}, {}),
    "with a scale of its own": (WanModel(named={"scale": 0.1}), {}, {}, {}),
    "with gradients": (WanModel(tokens=lambda *of: WanModel.tokens(*of).requires_grad_()), {}, {}, {}),
    "in dense_blocks": (WanModel(), {"dense_blocks": "0-1"}, {}, {}),
    "outside of start_percent to end_percent": (WanModel(), {"start_percent": 0.5}, {}, {}),
    "with as many tokens as the prompt, which may be cross-attention": (WanModel(), {}, {}, {"prompt": GRID.tokens}),
    "with refresh, where the sampler tells no step or guidance branch": (
        *(WanModel(), {"preset": PRESETS[0]}, {"sample_sigmas": None}, {}),
    ),
    "of other tokens than the video's": (LTXVModel(beside=(0, 2)), {}, {}, {}),
    "outside of the transformer's blocks": (WanModel(lists={"blocks": "another"}), {}, {}, {}),
    "in a block that this ComfyUI does not tell; newer versions do": (Subclass(tells_block=False), {}, {}, {}),
    # No whole patches.
    "where the model tells no latent grid": (HunyuanVideo(patch_size=(2, 2, 2)), {}, {}, {"latents": (3, 4, 8)}),
}


def test_what_is_not_for_the_preset_is_left_untouched_and_the_reason_reported(caplog):
    for reason, (model, settings, told, of_call) in REASONS.items():
        patcher, seam = patched(model, **{"preset": "vmonarch"} | settings)
        with caplog.at_level(logging.WARNING), sampling(patcher, SCHEDULE, **told) as ask:
            found = ask(0.9, ("cond",), **of_call)
        blocks = [(name, index, 0) for name in model.lists for index in range(2)]
        for block, out in zip(blocks, found, strict=True):
            qkv = [by_heads(model.tokens(block, 0.9, ("cond",), name, out.shape[1])) for name in "qkv"]
            close(out, exact(*qkv, **model.named))
        assert reason in seam.report.untouched and not seam.report.attended
        assert reason in caplog.text


@pytest.mark.parametrize("kind", [WanModel, HunyuanVideo])
def test_blocks_are_counted_where_comfyui_does_not_tell_them(kind):
    model = kind(tells_block=False)
    patcher, seam = patched(model, preset="vmonarch", dense_blocks="1")
    blocks = [(name, index, 0) for name in kind.lists for index in range(2)]
    with sampling(patcher, SCHEDULE) as ask:
        for block, out in zip(blocks, ask(0.9), strict=True):
            qkv = inputs(model, block, 0.9, ("cond", "uncond"))
            close(out, exact(*qkv) if block == blocks[1] else vmonarch_attention(*qkv, grid=GRID))
    assert seam.report.untouched["in dense_blocks"] == 1


@pytest.mark.parametrize("kind, beside", [(WanModel, (8, 3)), (HunyuanVideo, (6, 0))])
def test_reference_and_text_tokens_meet_the_video_in_one_softmax(kind, beside):
    model = kind(blocks=1, beside=beside)
    patcher, seam = patched(model, preset="vmonarch")
    with sampling(patcher, SCHEDULE) as ask:
        # Of 2 × 4 tokens.
        found = ask(0.9, ("cond",), **({"reference": torch.zeros(1, 16, 4, 8)} if beside[0] == 8 else {}))
    query, key, value = inputs(model, (next(iter(model.lists)), 0, 0), 0.9, ("cond",), sum(beside))
    expected, _ = Beside(Op(VMonarchOptions()), Exact())(query, key, value, Call(GRID, *beside))
    close(found[0], expected)
    assert seam.report.attended == len(model.lists)


def test_another_override_gets_what_is_left_and_stays():
    seen = []

    def theirs(func, q, k, *args, **kwargs):
        seen.append(q.shape == k.shape)
        return func(q, k, *args, **kwargs)

    patcher, _ = patched(WanModel())
    # After ours, as another node would do it.
    patcher.model_options["transformer_options"][KEY] = theirs
    with sampling(patcher, SCHEDULE) as ask:
        ask(1.0)
        assert seen.count(True) == 2, "exact steps are theirs"
        ask(0.9)
        seen.clear()
        ask(0.8)
    assert seen == [False, False]


def test_a_run_frees_its_residuals_however_it_ends_and_the_next_begins_anew():
    patcher, seam = patched(WanModel())
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), sampling(patcher, SCHEDULE) as ask:
            ask(0.9)
            ask(0.8)
            (branch,) = seam._run.branches.values()
            assert len(branch.residuals) == len(branch.devices) == 2
            raise KeyboardInterrupt
        assert not branch.residuals and seam._run is None
        assert (seam.report.attended, seam.report.exact, seam.report.forwards) == (4, 2, 2)


PLAN = {
    "format": "vmonarch-plan-1",
    "methods": {"t1": {"num_iterations": 1}, "plain": {"exact": None}, "full": None},
    "layers": {"transformer_2": [["t1", "plain"], ["full", "full"]]},
}


def test_a_plan_decides_what_every_head_computes(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    model = WanModel()
    patcher, seam = patched(model, plan=str(path), plan_part="transformer_2", refresh="none")
    with sampling(patcher, SCHEDULE) as ask:
        mixed, full = ask(0.9)
    block = ("blocks", 0, 0), 0.9, ("cond", "uncond")
    close(mixed[:, :, :1], ours(model, *block, num_iterations=1)[:, :, :1])
    close(mixed[:, :, 1:], ours(model, *block, exact=None)[:, :, 1:])
    close(full, exact(*inputs(model, ("blocks", 1, 0), *block[1:])))
    assert seam.report.untouched["that the plan leaves exact"] == 1 and seam.report.attended == 1
    patcher, _ = patched(model, plan=str(path), refresh="none")
    with pytest.raises(ValueError, match="it is for transformer_2"), sampling(patcher, SCHEDULE) as ask:
        ask(0.9)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_the_named_methods(preset):
    seam, method = OverrideAttention(preset=preset, offload_residuals=True), resolve_method(preset).processor()
    assert seam.processor.options == method.options
    expected = None if method.refresh is None else replace(method.refresh, offload=True)
    assert seam.sharing == expected and (expected is not None) == (preset in ("near-lossless", "fast"))
    assert OverrideAttention(preset=preset, refresh="none").sharing is None


@pytest.mark.parametrize(
    "argument, settings",
    [
        ("preset", {"preset": "local"}),
        ("refresh", {"refresh": "often"}),
        ("start_percent", {"start_percent": 0.6, "end_percent": 0.5}),
        ("dense_blocks", {"dense_blocks": "2"}),
        ("dense_blocks", {"dense_blocks": "5-2"}),
        ("attention.plan", {"plan": "missing.json"}),
        ("model", {}),
    ],
)
def test_bad_input_is_named(argument, settings):
    model = WanModel() if settings else torch.nn.Linear(1, 1)
    with pytest.raises(InputError) as error:
        patched(model, **settings)
    assert error.value.argument == argument


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """The module of the nodes, with stand-ins of what it takes of ComfyUI."""

    class Names:
        """Whose every name is a kind of input or output."""

        def __getattr__(self, kind):
            made = lambda name=None, **about: SimpleNamespace(kind=kind, id=name, **about)
            return SimpleNamespace(Input=made, Output=made)

    io = Names()
    io.ComfyNode, io.Schema = object, lambda **about: SimpleNamespace(**about)
    io.NodeOutput = lambda *values, ui=None: (*values, ui)
    modules = {
        "folder_paths": dict(get_input_directory=lambda: str(tmp_path)),
        "comfy": {},
        "comfy.patcher_extension": dict(CallbacksMP=CALLBACKS, WrappersMP=WRAPPERS),
        "comfy_api": {},
        "comfy_api.latest": dict(ComfyExtension=object, io=io, ui=SimpleNamespace(PreviewText=lambda text: text)),
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "vmonarch.pipelines.comfyui.nodes", raising=False)
    yield importlib.import_module("vmonarch.pipelines.comfyui.nodes")
    del sys.modules["vmonarch.pipelines.comfyui.nodes"], comfyui.nodes


def test_the_nodes_patch_a_model_and_report(nodes, tmp_path):
    found = asyncio.run(asyncio.run(comfyui.comfy_entrypoint()).get_node_list())
    assert found == [nodes.VMonarch, nodes.VMonarchReport]
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    settings = {entry.id: entry.default for entry in nodes.VMonarch.define_schema().inputs[1:]}
    before = Patcher(WanModel())
    patcher, _ = nodes.VMonarch.execute(before, **settings | {"plan": "plan.json", "plan_part": "transformer_2"})
    assert not before.wrappers and not before.attachments
    assert nodes.VMonarchReport.execute(patcher, "latents")[1] == "VMonarch has not run yet."
    with sampling(patcher, SCHEDULE) as ask:
        for sigma in SCHEDULE[:4]:
            ask(sigma)
    latents, text, _ = nodes.VMonarchReport.execute(patcher, "latents")
    assert latents == "latents"
    assert "on WanModel: latent grid 3×2×4, steps 8, forward calls 4." in text
    # Its errors are large: as many steps are exact as half of them allow.
    assert "by plan plan.json: 1. Exact, to renew residuals: 3 (steps 0, 1, 2). Error of sharing: 1." in text
    assert ". Residuals: 0.00 GiB, guidance branches 1." in text
    assert "8 cross-attention; 4 that the plan leaves exact" in text
    with pytest.raises(InputError, match="model has no VMonarch node before it"):
        nodes.VMonarchReport.execute(before, "latents")


def test_a_plan_that_is_replaced_under_its_name_is_another(nodes, tmp_path):
    settings = {entry.id: getattr(entry, "default", None) for entry in nodes.VMonarch.define_schema().inputs}
    told = lambda plan: nodes.VMonarch.fingerprint_inputs(**settings | {"plan": plan})
    assert told("") is told("plan.json") is None
    plan = tmp_path / "plan.json"
    plan.write_text("1")
    first = told("plan.json")
    plan.write_text("2")
    second = told("plan.json")
    assert first != second and second == told("plan.json") == told(str(plan))
    # Of another node, which ComfyUI has not asked; in a tuple, an object is equal to itself.
    assert (told(None),) != (told(None),)


def test_workflows_that_ship_have_all_inputs_of_the_node(nodes):
    schema = nodes.VMonarch.define_schema()
    names = [entry.id for entry in schema.inputs]
    workflow = json.loads((FOLDER / "wan-t2v.api.json").read_text())
    settings = workflow["vmonarch"]["inputs"]
    assert list(settings) == names
    settings = {name: value for name, value in settings.items() if name != "model"}
    assert settings == {entry.id: entry.default for entry in schema.inputs[1:]}
    (example,) = (FOLDER / "example_workflows").glob("*.json")
    (node,) = [node for node in json.loads(example.read_text())["nodes"] if node["type"] == "VMonarch"]
    assert node["widgets_values"] == list(settings.values())


def test_the_folder_asks_for_a_package_that_has_its_code():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    requirement = Requirement(*project["dependencies"])
    assert requirement.name == "vmonarch" and requirement.specifier.contains(vmonarch.__version__, prereleases=True)
    assert (FOLDER / "requirements.txt").read_text().split() == project["dependencies"]
    # As ComfyUI does it: by its path, under another name.
    spec = importlib.util.spec_from_file_location("custom_nodes.vmonarch", FOLDER / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert asyncio.iscoroutinefunction(module.comfy_entrypoint)
