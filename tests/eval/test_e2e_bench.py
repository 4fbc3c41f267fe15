"""The end-to-end benchmark: what it measures and extrapolates, what it records of failures, what it refuses."""

import collections
import copy
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanTransformer3DModel

import vmonarch
from vmonarch import VMonarchProcessor, residuals
from vmonarch.cli import main
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import step_kinds
from vmonarch.eval.bench import e2e
from vmonarch.eval.bench.clock import Clock
from vmonarch.eval.bench.denoiser import Denoiser, StepTimes, share_weights, steps_to_measure
from vmonarch.eval.bench.e2e_table import e2e_table, ratio, video_table
from vmonarch.eval.bench.parts import PARTS, REST_KERNELS, part_of, timed_parts
from vmonarch.eval.wan_models import read_model
from vmonarch.installation import is_applied
from vmonarch.kernels.common.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def document(tiny_yaml, tmp_path_factory):
    """What one run of the command wrote."""
    output = tmp_path_factory.mktemp("e2e") / "e2e.json"
    words = ["bench", "e2e", "--model", tiny_yaml, "--settings", "5x32x64", "--rounds", "2", "--steps", "30"]
    assert main([*words, "--device", "cpu", "--compile-backend", "eager", "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.fixture
def bench(tiny_yaml, tmp_path):
    """config(methods, **changes) of one tiny setting without VAE and text encoder."""

    def config(*methods, **changes):
        options = {"modes": ("eager",), "rounds": 1, "transformer_only": True, "device": "cpu"}
        options |= {"compile_backend": "eager", **changes}
        options.setdefault("settings", e2e.choose_settings(["5x32x64"], tiny_yaml))
        return e2e.E2EConfig(
            tmp_path / "e2e.json", methods=tuple(resolve_method(method, recipes=True) for method in methods), **options
        )

    return config


def rows_of(results):
    return {
        (row["method"], row["mode"]): row for run in results["runs"] for case in run["cases"] for row in case["rows"]
    }


def test_all_rows_are_measured_and_seconds_follow_from_steps(document, tiny_yaml):
    (run,) = document["runs"]
    (case,) = run["cases"]
    assert (case["grid"], case["tokens"], case["weights"]) == ([2, 2, 4], 16, "random")
    assert run["left_out"] == [] and str(Path(tiny_yaml).parent) not in run["command"]
    assert "no speed" in run["hardware"] and run["settings"]["steps"] == 30
    rows = rows_of(document)
    assert list(rows) == [(m, mode) for m in ("full", "vmonarch") for mode in ("eager", "compiled")]
    for (method, mode), row in rows.items():
        assert row["status"] == "ok" and row["rounds"] == 2
        assert 0 < row["forward_s"]["min"] and 2 * row["forward_s"]["min"] <= row["step_s"]["median"]
        assert row["denoise_s"] == pytest.approx(30 * row["step_s"]["median"])
        extra = case["vae"]["seconds"] + 2 * case["text_encoder"]["seconds"]
        assert extra > 0 and row["video_s"] == pytest.approx(row["denoise_s"] + extra)
        assert list(row["parts"]) == list(PARTS) and sum(row["parts"].values()) == pytest.approx(row["parts_of_ms"])
        if mode == "compiled":
            assert 0 < max(row["rest_ms"].values()) <= sum(row["rest_ms"].values()) <= 1.0001 * row["parts"]["rest"]
            assert len(row["rest_ms"]) <= REST_KERNELS
        if mode == "eager":
            assert all(ms > 0 for ms in row["parts"].values())
        if method == "full" and mode == "compiled":
            assert row["errors"]["to_stock"] < 1e-5
            (name,) = row["attention_operators"]
            assert name.startswith("aten::_scaled_dot_product") and row["parts"]["attention"] > 0
        if method == "vmonarch":
            assert row["errors"]["to_stock"] > 1e-3, "VMonarch is another attention"
    assert rows["vmonarch", "compiled"]["errors"]["to_eager"] < 1e-5


def test_blocks_are_compiled_and_a_wrong_compiler_is_noticed(bench):
    graphs = []

    def watched(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: tuple(1.5 * out for out in graph(*inputs))

    torch._dynamo.register_backend(watched, name="wrong_by_half")
    results = e2e.run_bench(bench("full", modes=("compiled",), compile_backend="wrong_by_half"))
    assert any("scaled_dot_product_attention" in target for target in graphs[0])
    row = rows_of(results)["full", "compiled"]
    assert row["status"] == "wrong" and "step_s" not in row, "what is wrong has no speed"
    assert row["errors"]["to_stock"] > 0.01
    assert e2e.wrong_rows(results) and "wrong" in e2e_table(results)


def test_blocks_that_are_not_compiled_are_not_called_compiled(bench, monkeypatch):
    monkeypatch.setattr(WanTransformer3DModel, "compile_repeated_blocks", lambda *_, **__: None)
    row = rows_of(e2e.run_bench(bench("full", modes=("compiled",))))["full", "compiled"]
    assert row["status"] == "failed" and "compiled nothing" in row["problem"]


@pytest.mark.parametrize("when", ["first call", "later"])
def test_a_failing_method_is_recorded_and_leaves_the_others_alone(bench, monkeypatch, when):
    calls = []

    def fail(self, *inputs):
        calls.append(inputs)
        # Two layers: the first two forward calls are those of the preparation.
        if when == "first call" or len(calls) > 2 * 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs[2]

    monkeypatch.setattr(VMonarchProcessor, "attend", fail)
    results = e2e.run_bench(bench("vmonarch", "full"))
    rows = rows_of(results)
    assert rows["vmonarch", "eager"]["status"] == "out of memory" and "step_s" not in rows["vmonarch", "eager"]
    assert rows["full", "eager"]["status"] == "ok"
    assert "out of memory" in e2e_table(results)
    assert json.loads(Path(bench("full").output).read_text()) == json.loads(json.dumps(results))


def test_a_vae_that_fails_leaves_the_steps(bench, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(e2e.WanModel, "build_vae", fail)
    results = e2e.run_bench(bench("full", transformer_only=False))
    assert results["runs"][0]["cases"][0]["vae"]["status"] == "out of memory"
    row = rows_of(results)["full", "eager"]
    assert row["denoise_s"] > 0 and row["video_s"] is None


def test_a_model_that_cannot_be_built_fails_all_rows(bench, monkeypatch):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(e2e.WanModel, "build_transformer", fail)
    results = e2e.run_bench(bench("full", "vmonarch"))
    assert [row["status"] for row in rows_of(results).values()] == ["out of memory"] * 2
    assert e2e_table(results).count("| out of memory |") == 2


def test_nothing_is_begun_after_the_budget(bench):
    results = e2e.run_bench(bench("full", budget=1e-9))
    assert results["runs"][0]["cases"] == []
    (left,) = results["runs"][0]["left_out"]
    assert left["case"] == "tiny.yaml-5x32x64" and "budget" in left["why"]
    assert "left out: tiny.yaml-5x32x64" in e2e_table(results)


@pytest.mark.parametrize("seconds, rounds, warm", [(5, 0, False), (2.4, 1, False), (1.4, 3, False), (0.6, 3, True)])
def test_as_many_rounds_as_fit(bench, monkeypatch, seconds, rounds, warm):
    # Two rows in 9 seconds: a round takes twice as long as a turn.
    steps = {name: [] for name in "ab"}

    class Stub(e2e.Row):
        def turn(self):
            steps[self.record["method"]].append(1)

        def finish(self, rounds, vae, text):
            self.record["rounds"] = rounds

    config = bench("full", rounds=3, budget=9.0)
    stubs = []
    for name in steps:
        stub = Stub(config.methods[0], "eager", config, 0)
        stub.denoiser = type("Marks", (), {"marks": []})()
        stub.record.update(method=name, status="ok")
        stub.turn_s = seconds
        stubs.append(stub)
    case = {"vae": {}, "text_encoder": {}}
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    e2e.measure_rows(stubs, case, config, Clock(CPU), 109.0)
    assert case["warm_up"] == warm and [len(found) for found in steps.values()] == [rounds + warm] * 2
    for stub in stubs:
        assert stub.record["status"] == ("ok" if rounds else "left out")
        assert stub.record.get("rounds", 0) == rounds
    if not rounds:
        assert "a round of 10 s did not fit the budget of 9 s" in stubs[0].record["problem"]


def test_rows_share_weights_and_nothing_else(tiny_yaml):
    stock = read_model(tiny_yaml).build_transformer("transformer", CPU, torch.float32)
    shells = [share_weights(stock) for _ in range(2)]
    for shell in shells:
        assert all(a is b for a, b in zip(shell.parameters(), stock.parameters(), strict=True))
    vmonarch.apply(shells[0], VMonarchProcessor())
    shells[0].compile_repeated_blocks(backend="eager")
    for other in (stock, shells[1]):
        assert not is_applied(other)
        assert type(other.blocks[0].attn1.processor).__name__ == "WanAttnProcessor"
        assert other.blocks[0]._compiled_call_impl is None


@pytest.mark.parametrize("expand", [False, True])
def test_a_step_calls_the_transformer_as_the_pipeline_does(tiny, expand):
    """Against diffusers' `WanPipeline`, by what reaches the transformer."""
    import dataclasses

    pipe = tiny.pipeline("t2v-5b" if expand else "t2v")
    calls = []

    def note(module, args, kwargs):
        given = {name: kwargs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")}
        calls.append({name: value.clone() for name, value in given.items()})

    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    tiny.generate(pipe, steps=3)
    expected, calls[:] = list(calls), []
    model = read_model("wan2.1-1.3b")
    model = dataclasses.replace(model, expand_timesteps=expand)
    denoiser = Denoiser(
        pipe.transformer, model, expected[0]["hidden_states"], [c["encoder_hidden_states"] for c in expected[:2]], 3,
        Clock(CPU),
    )  # fmt: skip
    with torch.no_grad():
        for _ in range(4):
            denoiser.step()
    assert len(calls) == 8 and [times.step for times in denoiser.step_times()] == [0, 1, 2, 0]
    for found, wanted in zip(calls, [*expected, *expected[:2]], strict=True):
        for name in ("timestep", "encoder_hidden_states"):
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
        assert found["hidden_states"].shape == wanted["hidden_states"].shape


def test_parts_are_timed_around_what_they_are_named_after(tiny, monkeypatch):
    """With a clock that only runs in attention, in projections and in the feed-forward."""
    from diffusers.models.transformers import transformer_wan

    class Ticks(Clock):
        now = 0.0

        def mark(self):
            return Ticks.now

        def between(self, start, stop):
            return stop - start

    def ticking(owner, name, ticks):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            Ticks.now += ticks
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    model = tiny.transformer(num_layers=2)
    ticking(transformer_wan, "dispatch_attention_fn", 100.0)
    dispatch = transformer_wan.dispatch_attention_fn
    ticking(VMonarchProcessor, "attend", 7.0)
    for block in model.blocks:
        ticking(block.attn1.to_out[0], "forward", 1.0)
        ticking(block.ffn, "forward", 10.0)
        ticking(block.attn1.norm_k, "forward", 0.25)
        ticking(block.norm3, "forward", 0.5)
    for processor, attention in ((None, 200.0), (VMonarchProcessor(), 14.0)):
        if processor is not None:
            vmonarch.apply(model, processor)
        before, hooks = Ticks.now, [dict(module._forward_hooks) for module in model.modules()]
        with timed_parts(model, Ticks(CPU)) as milliseconds:
            assert not model.blocks[0].attn1.norm_q._forward_hooks
            tiny.run(model)
        parts = e2e.with_rest(milliseconds(), Ticks.now - before)
        assert parts == {
            "attention": attention,
            "projections": 2.0,
            "norms and rotary": 1.5,
            "cross-attention": 200.0,
            "FFN": 20.0,
            "rest": 0.0,
        }
        assert transformer_wan.dispatch_attention_fn is dispatch
        assert [dict(module._forward_hooks) for module in model.modules()] == hooks
        assert "attend_layer" not in vars(model.blocks[0].attn1.processor)
    # A residual is part of attention.
    ticking(residuals, "add_residual", 3.0)
    vmonarch.apply(model, VMonarchProcessor(refresh=1))
    inputs = tiny.inputs()
    texts = [inputs["encoder_hidden_states"]] * 2
    denoiser = Denoiser(model, read_model("wan2.1-1.3b"), inputs["hidden_states"], texts, 3, Ticks(CPU))
    with torch.no_grad():
        denoiser.step()
        with timed_parts(model, denoiser.clock) as milliseconds:
            denoiser.forward()
    assert milliseconds()["attention"] == 20.0
    denoiser.marks = [(4, (0.0, 1e3, 3e3, 7e3))]
    assert denoiser.step_times() == [StepTimes(step=4, whole=7.0, forward=(1.0, 2.0))]


@pytest.mark.parametrize(
    "method, second, kinds, ranges",
    [
        ("vmonarch", 9, "aaaaaa", [(0,)]),
        ("vmonarch:dense_steps=2", 9, "ddaaaa", [(0,), (2,)]),
        ("vmonarch:refresh=1", 9, "kaaaaa", [(0, 1)]),
        ("vmonarch:refresh=1", 3, "kaakaa", [(0, 1)]),
        ("vmonarch:refresh=[0,1,4]", 9, "ekaaka", [(0,), (1, 2)]),
        ("vmonarch:refresh=[0,2,5],dense_steps=[3,4]", 9, "kakdde", [(5,), (3,), (0, 1)]),
        ("vmonarch:refresh=[0,2],dense_steps=[1]", 9, "kdkaaa", [(1,), (2, 3)]),
        ("vmonarch:refresh=[2],dense_steps=[0,1,3]", 9, "ddkdaa", [(2, 3, 4)]),
        ("vmonarch:refresh=[0,5]", 9, "kaaaae", [(5,), (0, 1)]),
        ("vmonarch:refresh=1.0", 9, "eeeeee", [(0,)]),
    ],
)
def test_kinds_of_steps_and_the_fewest_that_hold_them(method, second, kinds, ranges):
    """`second`: the first step of the second transformer."""
    transformers = ["transformer" if step < second else "transformer_2" for step in range(6)]
    found = step_kinds(resolve_method(method), transformers)
    assert "".join(kind[0] for kind in found) == kinds
    assert sorted(map(tuple, steps_to_measure(found))) == sorted(ranges)
    assert "a" not in kinds or steps_to_measure(found)[-1][-1] == kinds.index("a")


REFRESH = "vmonarch:refresh=[0,1,4]"


@pytest.fixture
def forwards(monkeypatch):
    """(denoiser, step, text, calls of what attention consists of, residuals of it and of others) of forward calls."""
    seen, made, calls = [], [], collections.Counter()

    def held(denoiser):
        record = getattr(denoiser.transformer, "_vmonarch_record", None)
        sharing = None if record is None else record.context.sharing
        return 0 if sharing is None else sum(len(branch.residuals) for branch in sharing._branches)

    class Watched(Denoiser):
        def __init__(self, *inputs):
            super().__init__(*inputs)
            made.append(self)

        def forward(self, text=0):
            others = sum(held(other) for other in made if other is not self)
            calls.clear()
            out = super().forward(text)
            seen.append((self, self.next_step, text, dict(calls), held(self), others))
            return out

    def counted(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **b: calls.update([name]) or original(*a, **b))

    counted(VMonarchProcessor, "attend")
    counted(VMonarchProcessor, "attend_exactly")
    counted(residuals, "attention_residual")
    counted(residuals, "add_residual")
    monkeypatch.setattr(e2e, "Denoiser", Watched)
    yield seen
    assert sum(held(denoiser) for denoiser in made) == 0, "memory of other rows"


def test_each_kind_of_step_is_measured_as_it_is_in_a_run(bench, forwards, monkeypatch):
    prepared, measure_rows = [], e2e.measure_rows

    def measure_prepared(rows, *others):
        prepared.extend(rows)
        assert not any(row.denoiser.marks for row in rows), "preparation is not measured"
        measure_rows(rows, *others)

    monkeypatch.setattr(e2e, "measure_rows", measure_prepared)
    results = e2e.run_bench(bench(REFRESH, "full", modes=e2e.MODES, steps=8, rounds=2))
    # What each forward call does in two layers, and the residuals after it, by text.
    expected = {
        "exact": ({"attend_exactly": 2}, (0, 0)),
        "kept": ({"attend_exactly": 2, "attend": 2, "attention_residual": 2}, (2, 4)),
        "approximate": ({"attend": 2, "add_residual": 2}, (4, 4)),
    }
    kinds = step_kinds(resolve_method(REFRESH), ["transformer"] * 8)
    rounds = 2 + results["runs"][0]["cases"][0]["warm_up"]
    rows, table = rows_of(results), e2e_table(results)
    # The first is stock diffusers.
    _, *denoisers = dict.fromkeys(denoiser for denoiser, *_ in forwards)
    for mode, denoiser, ready in zip(e2e.MODES, denoisers, prepared, strict=False):
        mine = [entry for entry in forwards if entry[0] is denoiser]
        for _, step, text, calls, held, others in mine:
            assert (calls, held, others) == (expected[kinds[step]][0], expected[kinds[step]][1][text], 0)
        # The first is checked; after a step of each other kind an approximate one is taken apart.
        turn = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
        assert [(step, text) for _, step, text, *_ in mine] == [(0, 0), *turn * (1 + rounds)]
        row = rows[REFRESH, mode]
        assert row["status"] == "ok" and row["rounds"] == 2
        assert ready.turn_s > 2 * row["single_forward_s"], "a turn is more than the approximate step"
        counts = {kind: found["steps"] for kind, found in row["kinds"].items()}
        assert counts == {"exact": 1, "kept": 2, "approximate": 5}
        total = sum(found["steps"] * found["step_s"]["median"] for found in row["kinds"].values())
        assert row["denoise_s"] == pytest.approx(total) == pytest.approx(8 * row["step_s"]["median"])
        assert row["errors"]["to_stock"] < 1e-5, "the first step is exact"
        assert f"| {REFRESH}, {mode} | 1 × {row['kinds']['exact']['step_s']['median']:.3f} |" in table
    assert row["errors"]["to_eager_approximate"] < 1e-5 and row["attention_operators"] == ["vmonarch::layer_attention"]
    assert row["parts"]["attention"] > 0
    assert "kinds" not in rows["full", "eager"] and list(rows["full", "compiled"]["errors"]) == ["to_stock", "to_eager"]
    full = [(step, text) for denoiser, step, text, *_ in forwards if denoiser is denoisers[2]]
    assert full[:6] == [(0, 0), (0, 0), (0, 0), (0, 1), (1, 0), (1, 1)], "one is checked, one is taken apart"


def test_dense_steps_and_a_second_transformer_count(bench, forwards, tiny_yaml, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(Path(tiny_yaml).read_text() + "boundary_ratio: 0.875\n")
    config = bench(
        "vmonarch:refresh=1", "vmonarch:dense_steps=1", steps=6, settings=e2e.choose_settings(["5x32x64"], str(path))
    )
    rows = rows_of(e2e.run_bench(config)).values()
    counts = [{kind: found["steps"] for kind, found in row["kinds"].items()} for row in rows]
    assert counts == [{"kept": 2, "approximate": 4}, {"dense": 1, "approximate": 5}]
    dense = forwards[-1][0]
    assert {step: calls for denoiser, step, _, calls, *_ in forwards if denoiser is dense} == {0: {}, 1: {"attend": 2}}


def test_what_is_compiled_for_a_kind_of_step_is_not_taken_apart(bench, monkeypatch):
    counts, original = [], e2e.profiled_parts

    def profiled(run, *others):
        before = e2e.compiled_graphs()
        found = original(run, *others)
        counts.append(e2e.compiled_graphs() - before)
        return found

    monkeypatch.setattr(e2e, "profiled_parts", profiled)
    e2e.run_bench(bench("vmonarch:dense_steps=1", modes=("compiled",), steps=2))
    assert counts == [0]


@pytest.mark.parametrize("guidance", [True, False])
def test_seconds_of_a_video_are_those_of_its_steps(bench, guidance):
    config = bench(REFRESH, steps=8, guidance=guidance)
    row = e2e.Row(config.methods[0], "eager", config, 0)
    row.kinds = ["exact", "kept", *["approximate"] * 6]
    seconds = {0: [5.0, 4.0, 6.0], 1: [7.0, 9.0, 8.0], 2: [1.0, 3.0, 2.5]}
    times = [StepTimes(step, whole, (whole / 4, whole / 4)) for step, wholes in seconds.items() for whole in wholes]
    row.denoiser = SimpleNamespace(step_times=lambda: times)
    row.finish(3, {"status": "ok", "seconds": 10.0}, {"status": "ok", "seconds": 1.0})
    denoise, texts = (5.0 + 8.0 + 6 * 2.5, 2.0) if guidance else (7.0, 1.0)
    assert row.record["denoise_s"] == denoise and row.record["video_s"] == denoise + 10.0 + texts
    assert row.record["step_s"]["median"] == denoise / 8 and row.record["forward_s"]["median"] == 7.0 / 8
    assert row.record["step_s"]["min"] == (4.0 + 7.0 + 6 * 1.0) / (8 if guidance else 32)
    assert row.record["kinds"]["kept"]["forward_s"]["median"] == 2.0


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")], ids=["wrong", "failing"])
def test_an_approximate_step_that_is_wrong_or_fails_is_recorded(bench, forwards, monkeypatch, error):
    right, calls = residuals.add_residual, []

    def add(*inputs, **options):
        calls.append(inputs)
        # Two layers: the first two forward calls with residuals are those of the eager row's preparation.
        if len(calls) <= 4:
            return right(*inputs, **options)
        if error is not None:
            raise error
        return 2 * right(*inputs, **options)

    monkeypatch.setattr(residuals, "add_residual", add)
    methods, modes = (["full"], ("eager",)) if error else ([], e2e.MODES)
    rows = rows_of(e2e.run_bench(bench("vmonarch:refresh=1", *methods, modes=modes, steps=3)))
    row = rows["vmonarch:refresh=1", modes[-1]]
    if error is None:
        assert row["status"] == "wrong" and "to eager approximate it is off by" in row["problem"]
    else:
        assert row["status"] == "out of memory" and rows["full", "eager"]["status"] == "ok"
    assert "step_s" not in row


@pytest.mark.parametrize(
    "name, shapes, part",
    [
        ("vmonarch::monarch_forward", [], "attention"),
        ("vmonarch::norm_rotary_forward", [], "norms and rotary"),
        ("aten::_scaled_dot_product_cudnn_attention", [[1, 2, 99, 12], [1, 2, 99, 12]], "attention"),
        ("aten::_scaled_dot_product_cudnn_attention", [[1, 2, 99, 12], [1, 2, 512, 12]], "cross-attention"),
        ("aten::addmm", [[24], [99, 24], [24, 24], [], []], "square"),
        ("aten::addmm", [[99, 24], [99, 24], [24, 24], [], []], "square"),
        ("aten::mm", [[512, 24], [24, 24]], "cross-attention"),
        ("aten::addmm", [[64], [99, 24], [24, 64]], "FFN"),
        ("aten::addmm", [[24], [99, 64], [64, 24]], "FFN"),
        ("aten::addmm", [[144], [1, 24], [24, 144]], None),
        ("aten::addmm", [[], [], []], None),
        ("aten::gelu", [[99, 64]], None),
        ("aten::scaled_dot_product_attention", [[1, 2, 99, 12], [1, 2, 99, 12]], None),
    ],
)
def test_operators_of_compiled_blocks_are_told_apart(name, shapes, part):
    assert part_of(name, shapes, tokens=99, width=24, ffn_dim=64) == part


def test_profiled_kernels_that_add_up_to_more_than_the_call_are_said_to(document):
    changed = copy.deepcopy(document)
    for row in changed["runs"][0]["cases"][0]["rows"]:
        row["parts_of_ms"] = 1.05e3 * row["single_forward_s"]
    assert "add up" not in e2e_table(changed)
    row["parts_of_ms"] *= 1.2
    assert "vmonarch, compiled: the profiled kernels add up to 1.26 times a forward call" in e2e_table(changed)


def test_the_table_holds_ratios_of_one_run_and_the_aims_beside_them(document, tmp_path):
    first, name = copy.deepcopy(document), e2e.SETTINGS[0].name
    case = first["runs"][0]["cases"][0]
    case.update(setting=name, aims=list(e2e.SETTINGS[0].aims), paper_s=list(e2e.SETTINGS[0].paper))
    for row, step in zip(case["rows"], (4.0, 3.0, 2.5, 1.0), strict=True):
        row["step_s"]["median"] = step
    lines = e2e_table(first).splitlines()
    line = next(line for line in lines if "vmonarch, compiled" in line)
    assert "4.00× (aim 2.2×) | 3.00× (aim 1.8×)" in line
    assert "| 1.60× | 1.20× |" in next(line for line in lines if "vmonarch, eager" in line)
    assert "paper 63.4 → 47.7 s" in e2e_table(first)
    # A later piece without full attention: its row replaces the first one's, and has nothing to be compared with.
    second = copy.deepcopy(first)
    piece = second["runs"][0]["cases"][0]
    piece["rows"] = [piece["rows"][3]]
    piece["rows"][0]["step_s"]["median"] = 0.5
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(part))
    assert main(["bench", "merge", *map(str, paths), "--output", str(tmp_path / "all.json")]) == 0
    together = json.loads((tmp_path / "all.json").read_text())
    assert together == e2e.merge([first, second]) and len(together["runs"]) == 2
    line = next(line for line in e2e_table(together).splitlines() if "vmonarch, compiled" in line)
    assert "| 0.500 |" in line and "– (aim 2.2×)" in line
    for row, video in zip(case["rows"], (8.0, 6.0, 5.0, 2.0), strict=True):
        row["video_s"] = video
    for row, gigabytes in zip(case["rows"], (4, 3, 4, 3.5), strict=True):
        row["peak_bytes"] = gigabytes * 1e9
    line = f"| {name} | 16 | 6.0 | 2.0 (3.00×) | 3.0 | 3.5 |"
    assert line in video_table(first) and "VMonarch, every step, s" in video_table(first)
    assert "near-lossless" not in video_table(first)
    # Of another run, without what it could be compared with, it does not take the place of the first.
    assert line in video_table(e2e.merge([first, second]))
    # Where another case has a method that this one lacks, the cells are empty.
    more = copy.deepcopy(first)
    more["runs"][0]["cases"][0]["setting"] = "another"
    _, stock, _, compiled = more["runs"][0]["cases"][0]["rows"]
    more["runs"][0]["cases"][0]["rows"] = [stock, {**compiled, "method": "near-lossless", "peak_bytes": 5e9}]
    both = video_table(e2e.merge([first, more]))
    assert f"| {name} | 16 | 6.0 | – | 2.0 (3.00×) | 3.0 | – |" in both
    assert "| another | 16 | 6.0 | 2.0 (3.00×) | – | 3.0 | 5.0 |" in both
    # What another run has measured is no longer left out.
    second["runs"][0]["left_out"] = [{"case": f"{name} full eager", "why": "a"}, {"case": "b", "why": "c"}]
    left_out = [line for line in e2e_table(e2e.merge([first, second])).splitlines() if "left out" in line]
    assert left_out == ["- left out: b (c)"]
    failed = {"status": "failed", "method": "full", "mode": "eager"}
    assert ratio(case["rows"][3], {"rows": [failed, case["rows"][3]]}, "eager") is None


def test_pieces_of_another_kind_are_refused(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"format": "another"}')
    assert main(["bench", "merge", str(tmp_path / "x.json"), "--output", str(tmp_path / "y.json")]) == 2
    assert "is no JSON of `vmonarch bench e2e`" in capsys.readouterr().err


def test_a_model_that_main_memory_cannot_hold_is_refused(tiny_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(e2e, "memory_bytes", lambda: 2**16)
    words = ["--device", "cpu", "--output", "x.json", "--model", tiny_yaml, "--settings", "5x32x64"]
    assert main(["bench", "e2e", *words]) == 2
    err = capsys.readouterr().err
    assert "--device cpu has not the memory for" in err and "smaller --model" in err and not list(tmp_path.iterdir())


def test_the_settings_are_those_of_the_paper():
    grids = {}
    for setting in e2e.choose_settings(None, None):
        model = read_model(setting.model)
        latents = model.latents(setting.frames, setting.height, setting.width, argument="settings")
        grids[setting.name] = (tuple(model.grid(latents)), model.transformer["num_attention_heads"])
    assert grids == {
        "1.3b-61x448x832": ((16, 28, 52), 12),
        "1.3b-141x448x832": ((36, 28, 52), 12),
        "1.3b-61x720x1280": ((16, 45, 80), 12),
        "14b-93x704x1280": ((24, 44, 80), 40),
        "5b-93x704x1280": ((24, 22, 40), 24),
    }
    assert [setting.name for setting in e2e.choose_settings(None, None, quick=True)] == ["1.3b-61x448x832"]
