"""The benchmarks of whole models: what they measure and extrapolate, what they record of failures, what they refuse."""

import collections
import copy
import json
from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.attention import FeedForward
from tiny_families import FAMILIES, GRID
from torch.utils._pytree import tree_map_only

import vmonarch
from vmonarch import VMonarchOptions, VMonarchProcessor, plan, residuals
from vmonarch.attend import Exact, Op
from vmonarch.cli import main
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.attention_flops import step_kinds
from vmonarch.eval.bench import e2e, families, gate, train
from vmonarch.eval.bench.machine import Clock
from vmonarch.eval.bench.runner import run_bench, wrong_rows
from vmonarch.eval.wan_models import WanModel, read_model, share_weights
from vmonarch.families import family_of
from vmonarch.grid import LatentGrid
from vmonarch.installation import is_applied
from vmonarch.kernels.common.launch import interpreted
from vmonarch.kernels.monarch import api

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
CPU = torch.device("cpu")
REFRESH = "vmonarch:refresh=[0,1,4]"
CACHE = (
    "stock:attention=vmonarch,cache={kind: taylorseer, disable_cache_before_step: 4, cache_interval: 3, max_order: 1}"
)


@pytest.fixture(scope="module")
def document(tiny_yaml, tmp_path_factory):
    """What one run of the command wrote."""
    output = tmp_path_factory.mktemp("e2e") / "e2e.json"
    words = ["bench", "e2e", "--model", tiny_yaml, "--settings", "5x32x64", "--rounds", "2", "--steps", "30"]
    assert main([*words, "--device", "cpu", "--compile-backend", "eager", "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.fixture
def measure(tiny_yaml, tmp_path):
    """measure(*methods, **options): the rows of one tiny setting without VAE and text encoder, by method and mode."""

    def run(*methods, rounds=1, budget=100.0, model=tiny_yaml, modes=("eager",), transformer_only=True, **options):
        options = {"modes": modes, "transformer_only": transformer_only, "compile_backend": "eager"} | options
        bench = e2e.bench(["5x32x64"], model, methods, **options)
        common = {"device": "cpu", "command": "", "say": lambda text: None, "output": tmp_path / "e2e.json"}
        found = run_bench(bench, rounds=rounds, budget=budget, **common)
        assert json.loads((tmp_path / "e2e.json").read_text()) == json.loads(json.dumps(found))
        (case,) = found["runs"][0]["cases"]
        return {(row["method"], row["mode"]): row for row in case["rows"]}

    return run


def test_all_rows_are_measured_and_seconds_follow_from_steps(document, tiny_yaml):
    (run,) = document["runs"]
    (case,) = run["cases"]
    assert (case["grid"], case["tokens"], case["weights"]) == ([2, 2, 4], 16, "random")
    assert run["left_out"] == [] and str(Path(tiny_yaml).parent) not in run["command"]
    assert "no speed" in run["hardware"] and run["settings"]["steps"] == 30
    rows = {(row["method"], row["mode"]): row for row in case["rows"]}
    assert list(rows) == [(m, mode) for m in ("full", "vmonarch") for mode in ("eager", "compiled")]
    for (_, mode), row in rows.items():
        assert row["status"] == "ok" and row["rounds"] == 2
        assert 0 < row["step_s"]["min"] and row["denoise_s"] == pytest.approx(30 * row["step_s"]["median"])
        extra = case["vae"]["seconds"] + 2 * case["text_encoder"]["seconds"]
        assert extra > 0 and row["video_s"] == pytest.approx(row["denoise_s"] + extra)
        assert list(row["errors"]) == (["step 0"] if mode == "compiled" else [])
        assert all(error["relative"] < 1e-5 for error in row["errors"].values())
    assert [table["name"] for table in document["tables"]] == ["steps"]


def test_a_compiler_that_is_wrong_or_does_nothing_is_noticed(measure, monkeypatch):
    graphs = []

    def watched(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: tuple(1.5 * out for out in graph(*inputs))

    torch._dynamo.register_backend(watched, name="wrong_by_half")
    (row,) = measure("full", modes=("compiled",), compile_backend="wrong_by_half").values()
    assert any("scaled_dot_product_attention" in target for target in graphs[0])
    assert row["status"] == "wrong" and "step_s" not in row, "what is wrong has no speed"
    assert "step 0 is off by" in row["problem"] and wrong_rows([{"case": "", "rows": [row]}], ())
    monkeypatch.setattr(WanTransformer3DModel, "compile_repeated_blocks", lambda *_, **__: None)
    (row,) = measure("full", modes=("compiled",)).values()
    assert row["status"] == "failed" and "compiled nothing" in row["problem"]


def test_a_method_that_fails_later_is_recorded_and_leaves_the_others_alone(measure, monkeypatch):
    calls = []

    def fail(self, *inputs):
        calls.append(inputs)
        if len(calls) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs[2], None

    monkeypatch.setattr(Op, "__call__", fail)
    rows = measure("vmonarch", "full")
    assert rows["vmonarch", "eager"]["status"] == "out of memory" and "step_s" not in rows["vmonarch", "eager"]
    assert rows["full", "eager"]["status"] == "ok"


def test_a_part_that_does_not_fit_is_recorded(measure, monkeypatch):
    build = WanModel.build

    def fail(self, part, *inputs):
        if part in missing:
            raise torch.OutOfMemoryError("too large")
        return build(self, part, *inputs)

    monkeypatch.setattr(WanModel, "build", fail)
    missing = ["vae"]
    (row,) = measure("full", transformer_only=False).values()
    assert row["denoise_s"] > 0 and row["video_s"] is None
    missing = ["transformer"]
    assert [row["status"] for row in measure("full", "vmonarch").values()] == ["out of memory"] * 2


def test_rows_share_weights_and_nothing_else(tiny_yaml):
    stock = read_model(tiny_yaml).build("transformer", CPU, torch.float32)
    shells = [share_weights(stock) for _ in range(2)]
    assert all(a is b for shell in shells for a, b in zip(shell.parameters(), stock.parameters(), strict=True))
    vmonarch.apply(shells[0], VMonarchProcessor())
    shells[0].compile_repeated_blocks(backend="eager")
    for other in (stock, shells[1]):
        assert not is_applied(other) and other.blocks[0]._compiled_call_impl is None
        assert type(other.blocks[0].attn1.processor).__name__ == "WanAttnProcessor"


@pytest.mark.parametrize(
    "method, second, kinds, steps",
    [
        ("vmonarch", 9, "aaaaaa", [0]),
        ("vmonarch:dense_steps=2", 9, "ddaaaa", [0, 2]),
        ("vmonarch:refresh=1", 3, "kaakaa", [0, 1]),
        ("vmonarch:refresh=[0,1,4]", 9, "ekaaka", [0, 1, 2]),
        ("vmonarch:refresh=[0,2,5],dense_steps=[3,4]", 9, "kakdde", [0, 1, 3, 5]),
        ("vmonarch:refresh=[0,2],dense_steps=[1]", 9, "kdkaaa", [1, 2, 3]),
        ("vmonarch:refresh=[2],dense_steps=[0,1,3]", 9, "ddkdaa", [2, 3, 4]),
        ("vmonarch:refresh=1.0", 9, "eeeeee", [0]),
        (CACHE, 9, "aaaasa", [0, 3, 4]),
    ],
)
def test_kinds_of_steps_and_the_fewest_that_hold_them(method, second, kinds, steps):
    """`second`: the first step of the second transformer."""
    transformers = ["transformer" if step < second else "transformer_2" for step in range(6)]
    found = step_kinds(resolve_method(method, recipes=True), transformers)
    assert "".join(kind[0] for kind in found) == kinds
    assert e2e.steps_to_measure(found) == steps


@pytest.fixture
def calls():
    """How often a function was called, by its name, or an element of the stack, by its class."""
    return collections.Counter()


@pytest.fixture
def counted(calls, monkeypatch):
    """counted(owner, name): count the calls of this function."""

    def count(owner, name):
        original, label = getattr(owner, name), owner.__name__ if name == "__call__" else name
        monkeypatch.setattr(owner, name, lambda *a, **b: calls.update([label]) or original(*a, **b))

    return count


@pytest.fixture
def forwards(calls, counted, monkeypatch):
    """(pipeline, step, calls of what attention consists of, residuals then) of every forward call."""
    seen = []

    def held(pipe):
        record = getattr(pipe.transformer, "_vmonarch_record", None)
        sharing = None if record is None else record.sharing
        return 0 if sharing is None else sum(len(branch.residuals) for branch in sharing._branches)

    make = e2e.Steps.of

    def watched(*inputs):
        pipe = make(*inputs)

        def note(*_):
            seen.append((pipe, pipe.step, dict(calls), held(pipe)))
            calls.clear()

        pipe.transformer.register_forward_hook(note)
        return pipe

    counted(Op, "__call__")
    counted(Exact, "__call__")
    counted(residuals, "attention_residual")
    counted(residuals, "add_residual")
    monkeypatch.setattr(e2e.Steps, "of", watched)
    yield seen
    assert sum(held(pipe) for pipe, *_ in seen) == 0, "memory of other rows"


def test_each_kind_of_step_is_measured_as_it_is_in_a_run(measure, forwards):
    rows = measure(REFRESH, modes=e2e.MODES, steps=8, rounds=2)
    # What each forward call does in two layers, and the residuals after it, by text.
    expected = {
        "exact": ({"Exact": 2}, (0, 0)),
        "kept": ({"Exact": 2, "Op": 2, "attention_residual": 2}, (2, 4)),
        "approximate": ({"Op": 2, "add_residual": 2}, (4, 4)),
    }
    kinds = step_kinds(resolve_method(REFRESH), ["transformer"] * 8)
    eager, compiled, reference = dict.fromkeys(pipe for pipe, *_ in forwards)
    # It is checked, called once more, and measured twice.
    for pipe, turns in ((eager, 4), (compiled, 4), (reference, 1)):
        mine = [entry for entry in forwards if entry[0] is pipe]
        assert [step for _, step, *_ in mine] == [0, 0, 1, 1, 2, 2] * turns
        for n, (_, step, calls, held) in enumerate(mine):
            assert calls == expected[kinds[step]][0] and held == expected[kinds[step]][1][n % 2]
    for row in rows.values():
        assert row["status"] == "ok" and row["rounds"] == 2
        assert {kind: of["steps"] for kind, of in row["kinds"].items()} == {"exact": 1, "kept": 2, "approximate": 5}
        total = sum(of["steps"] * of["step_s"]["median"] for of in row["kinds"].values())
        assert row["denoise_s"] == pytest.approx(total) == pytest.approx(8 * row["step_s"]["median"])


def test_dense_steps_a_cache_and_a_second_transformer_count(measure, forwards, counted, tiny_yaml, tmp_path):
    counted(FeedForward, "forward")
    path = tmp_path / "two.yaml"
    path.write_text(Path(tiny_yaml).read_text() + "boundary_ratio: 0.875\n")
    cached = f"{CACHE},compile=false"
    methods = ("vmonarch:refresh=1", "vmonarch:dense_steps=1", cached)
    rows = measure(*methods, steps=8, model=str(path), guidance=False)
    counts = [{kind: of["steps"] for kind, of in row["kinds"].items()} for row in rows.values()]
    assert counts[:2] == [{"kept": 2, "approximate": 6}, {"dense": 1, "approximate": 7}]
    by_method = collections.defaultdict(dict)
    for pipe, step, calls, _ in forwards:
        by_method[pipe][step] = calls
    _, dense, skipping = by_method.values()
    whole = {"forward": 2, "Op": 2}
    assert dense == {0: {"forward": 2}, 1: whole} and skipping == {0: whole, 6: whole, 7: {}}


def test_seconds_of_a_video_are_those_of_its_steps():
    kinds = ["exact", "kept", *["approximate"] * 6]
    seconds = {0: [5.0, 4.0, 6.0], 1: [7.0, 9.0, 8.0], 2: [1.0, 3.0, 2.5]}
    marks = [(step, 0.0, whole) for step, of in seconds.items() for whole in of]
    row = {"method": "vmonarch eager", **e2e.Steps.seconds(SimpleNamespace(marks=marks), Clock(CPU), 9, kinds)}
    case = {"rows": [row], "vae": {"status": "ok", "seconds": 10.0}, "text_encoder": {"status": "ok", "seconds": 1.0}}
    e2e.finish(e2e.Options(steps=8, guidance=False), case)
    denoise = 5.0 + 8.0 + 6 * 2.5
    assert row["denoise_s"] == denoise and row["video_s"] == denoise + 10.0 + 1.0
    assert row["step_s"]["median"] == denoise / 8 and row["step_s"]["min"] == (4.0 + 7.0 + 6 * 1.0) / 8
    assert row["kinds"]["kept"]["steps"] == 1 and row["kinds"]["kept"]["step_s"]["median"] == 8.0


def test_an_approximate_step_that_is_wrong_is_noticed(measure, monkeypatch):
    right, calls = residuals.add_residual, []

    def add(*inputs, **options):
        calls.append(inputs)
        # Two layers, two texts: the compiled row's first turn is wrong, what it is compared with is right.
        return (2 if len(calls) <= 4 else 1) * right(*inputs, **options)

    monkeypatch.setattr(residuals, "add_residual", add)
    (row,) = measure("vmonarch:refresh=1", modes=("compiled",), steps=3).values()
    assert row["status"] == "wrong" and "step 1 is off by" in row["problem"] and "step_s" not in row


def test_tables_hold_ratios_of_one_run_and_the_last_row_that_has_times(document, tmp_path):
    first = copy.deepcopy(document)
    case = first["runs"][0]["cases"][0]
    for row, step, gigabytes in zip(case["rows"], (4.0, 3.0, 2.5, 1.0), (4, 3, 4, 3.5), strict=True):
        row.update(step_s={"median": step}, denoise_s=step, video_s=2 * step, peak_bytes=gigabytes * 1e9)
    tables = lambda *parts: {
        table["name"]: {tuple(row[:2]): row[2:] for row in table["rows"]}
        for table in e2e.document([run for part in parts for run in part["runs"]])["tables"]
    }
    found, name = tables(first), case["setting"]
    assert found["steps"][name, "vmonarch, compiled"][1:] == ["1.000", "2.0", "4.00×", "3.00×", "3.5"]
    assert found["steps"][name, "full, compiled"][1:] == ["3.000", "6.0", "1.33×", "–", "3.0"]
    # A later piece without full attention: its row replaces the first one's, and has nothing to be compared with.
    second = copy.deepcopy(first)
    piece = second["runs"][0]["cases"][0]
    piece["rows"] = [piece["rows"][3], {"method": "full", "mode": "eager", "status": "failed"}]
    piece["rows"][0].update(step_s={"median": 0.5})
    paths = [tmp_path / "a.json", tmp_path / "b.json", Path(__file__).parents[2] / "docs" / "benchmarks" / "e2e.json"]
    for path, part in zip(paths, (first, second), strict=False):
        path.write_text(json.dumps(part))
    assert main(["bench", "merge", *map(str, paths), "--output", str(tmp_path / "all.json")]) == 0
    together = json.loads((tmp_path / "all.json").read_text())
    assert len(together["runs"]) > 4 and together["caption"].count("5x32x64") == 1
    found = {table["name"]: {tuple(row[:2]): row[2:] for row in table["rows"]} for table in together["tables"]}
    assert found["steps"][name, "vmonarch, compiled"][1:5] == ["0.500", "2.0", "–", "–"]
    assert found["steps"][name, "full, eager"][1] == "4.000", "what failed later does not replace it"
    assert len(found["steps"]) > 30 and len(found["fits"]) == 9, "tables of other makers stay"


def test_what_is_no_benchmark_is_not_merged(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text('{"format": "another"}')
    assert main(["bench", "merge", "x.json", "--output", "y.json"]) == 2
    assert "is no JSON of `vmonarch bench e2e`" in capsys.readouterr().err and not (tmp_path / "y.json").exists()


def test_the_settings_are_those_of_the_paper():
    grids = {}
    for label, name, size in e2e.choose_settings(None, None):
        model = read_model(name)
        grids[label] = (tuple(model.grid(size, argument="settings")), model.transformer["num_attention_heads"])
    assert grids == {
        "1.3b-61x448x832": ((16, 28, 52), 12),
        "1.3b-141x448x832": ((36, 28, 52), 12),
        "1.3b-61x720x1280": ((16, 45, 80), 12),
        "14b-93x704x1280": ((24, 44, 80), 40),
        "5b-93x704x1280": ((24, 22, 40), 24),
    }
    assert [setting.label for setting in e2e.choose_settings(None, None, quick=True)] == ["1.3b-61x448x832"]


def small(name):
    """A case of a tiny model, with one sample whose prompt fills its places."""
    tiny = FAMILIES[name]
    inputs = lambda grid, noise: {
        key: torch.ones_like(value[:1]) if key.endswith("mask") else value[: 1 if value.ndim else None]
        for key, value in tiny.inputs(*grid).items()
        if isinstance(value, torch.Tensor)
    }
    return families.case_of(name, tiny.model, tiny.whole_config(), LatentGrid(*GRID), 60, inputs)


@pytest.fixture
def uncompiled(monkeypatch):
    blocks = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: blocks.append((self, options)))
    return blocks


@pytest.mark.parametrize("name", ["hunyuan", "cosmos"])
def test_families_pass_the_gate_and_vmonarch_approximates(name, uncompiled):
    found = {}
    for method, make in families.ways(small(name), CPU, torch.float32).items():
        way = make()
        (found[method],) = results = way.run()
        errors, problem = gate.compare(way.found(results), way.expected(), torch.float32)
        assert not problem, (method, errors)
    assert (found["exact"] - found["stock"]).norm() < 1e-4 * found["stock"].norm()
    for method in families.PRESETS:
        assert (found[method] - found["stock"]).norm() > 1e-4 * found["stock"].norm()
    assert {tuple(options.items()) for _, options in uncompiled} == {(("fullgraph", True), ("dynamic", False))}
    assert len({id(block) for block, _ in uncompiled}) == 2 * len(families.METHODS)


def test_families_with_a_wrong_kernel_or_an_infinite_result_get_no_speed(uncompiled, monkeypatch):
    attend, masks, exact = api.vmonarch_attention, [], Exact.__call__
    monkeypatch.setattr(Exact, "__call__", lambda *inputs: masks.append(inputs[4].key_mask) or exact(*inputs))
    made = families.ways(small("hunyuan"), CPU, torch.float32)
    made["exact"]().run()
    way = made["vmonarch"]()
    results = way.run()
    assert masks[:2] == [None, None] and len(masks) == 6 and all(mask is not None and mask.all() for mask in masks[2:])
    with pytest.raises(RuntimeError, match="not finite"):
        way.found((results[0] * torch.inf,))

    def wrong(*tensors, **options):
        out, lse = attend(*tensors, **options)
        return out, lse + 1

    monkeypatch.setitem(plan._OPS, VMonarchOptions, wrong)
    assert "out is off by" in gate.compare(way.found(results), way.expected(), torch.float32)[1]


@pytest.mark.parametrize("case", families.CASES, ids=lambda case: case.label)
def test_families_are_models_that_can_be_called(case, monkeypatch):
    inputs = tree_map_only(torch.Tensor, lambda x: x.to("meta"), families.inputs_of(case, CPU, torch.float32))
    with torch.device("meta"):
        model = getattr(diffusers, case.model)(**case.config)
    family = family_of(model)
    assert family.grid(inputs, model.config) == case.grid and family.number_of_layers(model) < case.of
    # HunyuanVideo-1.5 asks whether there is an image, and looks for what is no padding.
    of_axes = torch.all
    monkeypatch.setattr(torch, "all", lambda x, **axes: of_axes(x, **axes) if axes else True)
    with torch.no_grad(), torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):
        assert model(**inputs)[0].device.type == "meta"


def test_training_steps_of_every_size_and_method_are_measured(run_command, tiny_yaml):
    words = ["--model", tiny_yaml, "--size", "32", "64", "--rounds", "1"]
    code, document = run_command("train", *words, "--frames", "5", "9")
    assert code == 0 and document["settings"]["parameters"] > 1000
    assert [(case["case"], case["grid"]) for case in document["cases"]] == [
        ("5x32x64", [2, 2, 4]),
        ("9x32x64", [3, 2, 4]),
    ]
    for case in document["cases"]:
        assert [row["method"] for row in case["rows"]] == ["full", "vmonarch"]
        assert all(row["ms"]["median"] > 0 and row["rounds"] == 1 for row in case["rows"])


def test_a_step_trains_all_weights_with_the_attention_that_is_set(tiny_yaml, monkeypatch):
    transformer, step = train.training_step(read_model(tiny_yaml).transformer, (2, 4, 8), CPU)
    attend, seen = Op.__call__, []
    monkeypatch.setattr(Op, "__call__", lambda *inputs: seen.append(inputs[4].grid) or attend(*inputs))
    vmonarch.apply(transformer, VMonarchProcessor())
    before = [parameter.detach().clone() for parameter in transformer.parameters()]
    step()
    # Both layers forward, and once more because of gradient checkpointing.
    assert [tuple(grid) for grid in seen] == [(2, 2, 4)] * 4
    assert all((new != old).any() for new, old in zip(transformer.parameters(), before, strict=True))
