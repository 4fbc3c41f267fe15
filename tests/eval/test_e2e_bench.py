"""The end-to-end benchmark: what it measures and extrapolates, what it records of failures, what it refuses."""

import collections
import copy
import dataclasses
import json
from pathlib import Path

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
from vmonarch.eval.bench.denoiser import Denoiser, share_weights, steps_to_measure
from vmonarch.eval.bench.parts import PARTS, part_of
from vmonarch.eval.bench.runner import wrong_rows
from vmonarch.eval.wan_models import read_model
from vmonarch.installation import is_applied
from vmonarch.kernels.common.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
CPU = torch.device("cpu")
REFRESH = "vmonarch:refresh=[0,1,4]"


@pytest.fixture(scope="module")
def document(tiny_yaml, tmp_path_factory):
    """What one run of the command wrote."""
    output = tmp_path_factory.mktemp("e2e") / "e2e.json"
    words = ["bench", "e2e", "--model", tiny_yaml, "--settings", "5x32x64", "--rounds", "2", "--steps", "30"]
    assert main([*words, "--device", "cpu", "--compile-backend", "eager", "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.fixture
def measure(tiny_yaml, tmp_path):
    """measure(*methods, **options): the case of one tiny setting without VAE and text encoder."""

    def run(*methods, rounds=1, budget=100.0, model=tiny_yaml, **options):
        options = {"modes": ("eager",), "transformer_only": True, "compile_backend": "eager"} | options
        bench = e2e.bench(["5x32x64"], model, methods, **options)
        common = {"device": "cpu", "command": "", "say": lambda text: None, "output": tmp_path / "e2e.json"}
        found = e2e.measure(bench, rounds=rounds, budget=budget, **common)
        assert json.loads((tmp_path / "e2e.json").read_text()) == json.loads(json.dumps(found))
        (case,) = found["runs"][0]["cases"]
        return case

    return run


def rows_of(case):
    return {(row["method"], row["mode"]): row for row in case["rows"]}


def test_all_rows_are_measured_and_seconds_follow_from_steps(document, tiny_yaml):
    (run,) = document["runs"]
    (case,) = run["cases"]
    assert (case["grid"], case["tokens"], case["weights"]) == ([2, 2, 4], 16, "random")
    assert run["left_out"] == [] and str(Path(tiny_yaml).parent) not in run["command"]
    assert "no speed" in run["hardware"] and run["settings"]["steps"] == 30
    rows = rows_of(case)
    assert list(rows) == [(m, mode) for m in ("full", "vmonarch") for mode in ("eager", "compiled")]
    for (method, mode), row in rows.items():
        assert row["status"] == "ok" and row["rounds"] == 2
        assert 0 < row["forward_s"]["min"] and 2 * row["forward_s"]["min"] <= row["step_s"]["median"]
        assert row["denoise_s"] == pytest.approx(30 * row["step_s"]["median"])
        extra = case["vae"]["seconds"] + 2 * case["text_encoder"]["seconds"]
        assert extra > 0 and row["video_s"] == pytest.approx(row["denoise_s"] + extra)
        if mode == "compiled":
            assert list(row["parts"]) == list(PARTS) and row["parts"]["projections"] > 0
            assert method != "full" or row["parts"]["attention"] > 0
            assert sum(row["parts"].values()) == pytest.approx(row["parts_of_ms"])
        if method == "vmonarch":
            assert row["errors"]["to_stock"] > 1e-3, "VMonarch is another attention"
    assert rows["full", "compiled"]["errors"]["to_stock"] < 1e-5
    assert rows["vmonarch", "compiled"]["errors"]["to_eager"] < 1e-5
    assert [table["name"] for table in document["tables"]] == ["videos", "steps", "parts"]


def test_blocks_are_compiled_and_a_wrong_compiler_is_noticed(measure, monkeypatch):
    graphs = []

    def watched(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: tuple(1.5 * out for out in graph(*inputs))

    torch._dynamo.register_backend(watched, name="wrong_by_half")
    case = measure("full", modes=("compiled",), compile_backend="wrong_by_half")
    assert any("scaled_dot_product_attention" in target for target in graphs[0])
    (row,) = case["rows"]
    assert row["status"] == "wrong" and "step_s" not in row, "what is wrong has no speed"
    assert row["errors"]["to_stock"] > 0.01 and wrong_rows([case], ())
    monkeypatch.setattr(WanTransformer3DModel, "compile_repeated_blocks", lambda *_, **__: None)
    (row,) = measure("full", modes=("compiled",))["rows"]
    assert row["status"] == "failed" and "compiled nothing" in row["problem"]


@pytest.mark.parametrize("when", [0, 4], ids=["first call", "later"])
def test_a_failing_method_is_recorded_and_leaves_the_others_alone(measure, monkeypatch, when):
    calls = []

    def fail(self, *inputs):
        calls.append(inputs)
        if len(calls) > when:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inputs[2]

    monkeypatch.setattr(VMonarchProcessor, "attend", fail)
    rows = rows_of(measure("vmonarch", "full"))
    assert rows["vmonarch", "eager"]["status"] == "out of memory" and "step_s" not in rows["vmonarch", "eager"]
    assert rows["full", "eager"]["status"] == "ok"


@pytest.mark.parametrize("part", ["vae", "transformer"])
def test_a_model_that_does_not_fit_is_recorded(measure, monkeypatch, part):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(e2e.WanModel, f"build_{part}", fail)
    case = measure("full", "vmonarch", transformer_only=part == "transformer")
    if part == "transformer":
        assert [row["status"] for row in case["rows"]] == ["out of memory"] * 2
        return
    assert case["vae"]["status"] == "out of memory"
    assert all(row["denoise_s"] > 0 and row["video_s"] is None for row in case["rows"])


def test_nothing_is_begun_after_the_budget(measure, monkeypatch):
    monkeypatch.setattr(e2e.WanModel, "build_transformer", lambda *_: pytest.fail("a transformer was built"))
    (row,) = measure("full", budget=1e-9)["rows"]
    assert (row["status"], row["method"], row["mode"]) == ("left out", "full", "eager") and "budget" in row["problem"]


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
    pipe = tiny.pipeline("t2v-5b" if expand else "t2v")
    calls = []

    def note(module, args, kwargs):
        given = {name: kwargs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")}
        calls.append({name: value.clone() for name, value in given.items()})

    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    tiny.generate(pipe, steps=3)
    expected, calls[:] = list(calls), []
    model = dataclasses.replace(read_model("wan2.1-1.3b"), expand_timesteps=expand)
    texts = [call["encoder_hidden_states"] for call in expected[:2]]
    denoiser = Denoiser(pipe.transformer, model, expected[0]["hidden_states"], texts, 3, Clock(CPU))
    with torch.no_grad():
        for _ in range(4):
            denoiser.step()
    assert len(calls) == 8 and [step for step, *_ in denoiser.step_times(4)] == [0, 1, 2, 0]
    for found, wanted in zip(calls, [*expected, *expected[:2]], strict=True):
        for name in ("timestep", "encoder_hidden_states"):
            torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=0)
        assert found["hidden_states"].shape == wanted["hidden_states"].shape


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


def test_each_kind_of_step_is_measured_as_it_is_in_a_run(measure, forwards):
    rows = rows_of(measure(REFRESH, "full", modes=e2e.MODES, steps=8, rounds=2))
    # What each forward call does in two layers, and the residuals after it, by text.
    expected = {
        "exact": ({"attend_exactly": 2}, (0, 0)),
        "kept": ({"attend_exactly": 2, "attend": 2, "attention_residual": 2}, (2, 4)),
        "approximate": ({"attend": 2, "add_residual": 2}, (4, 4)),
    }
    kinds = step_kinds(resolve_method(REFRESH), ["transformer"] * 8)
    eager, stock, compiled, *_ = dict.fromkeys(denoiser for denoiser, *_ in forwards)
    turn = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for mode, denoiser in (("eager", eager), ("compiled", compiled)):
        mine = [entry for entry in forwards if entry[0] is denoiser]
        # It is checked, called once more, and measured twice; when compiled, an approximate call is taken apart.
        apart = [(1, 0), (1, 1), (2, 0)] if mode == "compiled" else []
        assert [(step, text) for _, step, text, *_ in mine] == [*turn * 4, *apart]
        for _, step, text, calls, held, others in mine:
            assert (calls, others) == (expected[kinds[step]][0], 0)
            assert held == expected[kinds[step]][1][text]
        row = rows[REFRESH, mode]
        assert row["status"] == "ok" and row["rounds"] == 2
        counts = {kind: found["steps"] for kind, found in row["kinds"].items()}
        assert counts == {"exact": 1, "kept": 2, "approximate": 5}
        total = sum(found["steps"] * found["step_s"]["median"] for found in row["kinds"].values())
        assert row["denoise_s"] == pytest.approx(total) == pytest.approx(8 * row["step_s"]["median"])
        assert row["errors"]["to_stock"] < 1e-5 < row["errors"]["to_stock_approximate"], "the first step is exact"
    assert row["errors"]["to_eager_approximate"] < 1e-5 and row["parts"]["attention"] > 0
    assert [(step, text) for denoiser, step, text, *_ in forwards if denoiser is stock] == [(0, 0), (2, 0)]
    assert "kinds" not in rows["full", "eager"] and list(rows["full", "compiled"]["errors"]) == ["to_stock", "to_eager"]


def test_dense_steps_and_a_second_transformer_count(measure, forwards, tiny_yaml, tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text(Path(tiny_yaml).read_text() + "boundary_ratio: 0.875\n")
    case = measure("vmonarch:refresh=1", "vmonarch:dense_steps=1", steps=6, model=str(path))
    counts = [{kind: found["steps"] for kind, found in row["kinds"].items()} for row in case["rows"]]
    assert counts == [{"kept": 2, "approximate": 4}, {"dense": 1, "approximate": 5}]
    dense = forwards[-1][0]
    assert {step: calls for denoiser, step, _, calls, *_ in forwards if denoiser is dense} == {0: {}, 1: {"attend": 2}}


@pytest.mark.parametrize("guidance", [True, False])
def test_seconds_of_a_video_are_those_of_its_steps(guidance):
    kinds = ["exact", "kept", *["approximate"] * 6]
    seconds = {0: [5.0, 4.0, 6.0], 1: [7.0, 9.0, 8.0], 2: [1.0, 3.0, 2.5]}
    times = [(step, whole, [whole / 4] * 2) for step, wholes in seconds.items() for whole in wholes]
    row = {"method": "vmonarch eager", **e2e.step_seconds(times, kinds, guidance)}
    case = {"rows": [row], "vae": {"status": "ok", "seconds": 10.0}, "text_encoder": {"status": "ok", "seconds": 1.0}}
    e2e.finish(e2e.Options(steps=8, guidance=guidance), case)
    denoise, texts = (5.0 + 8.0 + 6 * 2.5, 2.0) if guidance else (7.0, 1.0)
    assert row["denoise_s"] == denoise and row["video_s"] == denoise + 10.0 + texts
    assert row["step_s"]["median"] == denoise / 8 and row["forward_s"]["median"] == 7.0 / 8
    assert row["step_s"]["min"] == (4.0 + 7.0 + 6 * 1.0) / (8 if guidance else 32)
    assert row["kinds"]["kept"]["forward_s"]["median"] == 2.0


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError("CUDA out of memory")], ids=["wrong", "failing"])
def test_an_approximate_step_that_is_wrong_or_fails_is_recorded(measure, monkeypatch, error):
    right, calls = residuals.add_residual, []

    def add(*inputs, **options):
        calls.append(inputs)
        # Two layers, two texts: the eager row's two turns and its round come first.
        if error is None and len(calls) <= 8:
            return right(*inputs, **options)
        if error is not None:
            raise error
        return 2 * right(*inputs, **options)

    monkeypatch.setattr(residuals, "add_residual", add)
    methods, modes = (["full"], ("eager",)) if error else ([], e2e.MODES)
    rows = rows_of(measure("vmonarch:refresh=1", *methods, modes=modes, steps=3))
    row = rows["vmonarch:refresh=1", modes[-1]]
    if error is None:
        assert row["status"] == "wrong" and "to_eager_approximate is off by" in row["problem"]
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
        ("aten::mm", [[512, 24], [24, 24]], "cross-attention"),
        ("aten::addmm", [[64], [99, 24], [24, 64]], "FFN"),
        ("aten::addmm", [[24], [99, 64], [64, 24]], "FFN"),
        ("aten::addmm", [[144], [1, 24], [24, 144]], None),
        ("aten::gelu", [[99, 64]], None),
        ("aten::scaled_dot_product_attention", [[1, 2, 99, 12], [1, 2, 99, 12]], None),
    ],
)
def test_operators_of_compiled_blocks_are_told_apart(name, shapes, part):
    assert part_of(name, shapes, tokens=99, width=24, ffn_dim=64) == part


def test_tables_hold_ratios_of_one_run_and_the_last_row_that_has_times(document, tmp_path):
    first = copy.deepcopy(document)
    case = first["runs"][0]["cases"][0]
    numbers = zip(case["rows"], (4.0, 3.0, 2.5, 1.0), (8.0, 6.0, 5.0, 2.0), (4, 3, 4, 3.5), strict=True)
    for row, step, video, gigabytes in numbers:
        row.update(step_s={"median": step}, video_s=video, peak_bytes=gigabytes * 1e9)
    tables = lambda *parts: {
        table["name"]: {tuple(row[:2]): row[2:] for row in table["rows"]}
        for table in e2e.document([run for part in parts for run in part["runs"]])["tables"]
    }
    found, name = tables(first), case["setting"]
    assert found["steps"][name, "vmonarch, compiled"][1:5] == ["1.000", "4.00×", "3.00×", "3.5"]
    assert found["steps"][name, "vmonarch, eager"][1:4] == ["2.500", "1.60×", "1.20×"]
    assert found["videos"][name, "vmonarch, compiled"] == ["16", "2.0", "3.00×", "3.5"]
    assert found["videos"][name, "full, compiled"] == ["16", "6.0", "–", "3.0"]
    # A later piece without full attention: its row replaces the first one's, and has nothing to be compared with.
    second = copy.deepcopy(first)
    piece = second["runs"][0]["cases"][0]
    piece["rows"] = [piece["rows"][3], {"method": "full", "mode": "eager", "status": "failed"}]
    piece["rows"][0].update(step_s={"median": 0.5}, kinds={"kept": {"steps": 3, "step_s": {"median": 0.25}}})
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, part in zip(paths, (first, second), strict=True):
        path.write_text(json.dumps(part))
    assert main(["bench", "merge", *map(str, paths), "--output", str(tmp_path / "all.json")]) == 0
    together = json.loads((tmp_path / "all.json").read_text())
    assert len(together["runs"]) == 2 and together["caption"].count("Made by") == 1
    found = tables(together)
    assert found["steps"][name, "vmonarch, compiled"][1:4] == ["0.500", "–", "–"]
    assert found["steps"][name, "full, eager"][1] == "4.000", "what failed later does not replace it"
    assert found["kinds"][name, "vmonarch, compiled"] == ["kept", "3", "0.250"]


def test_committed_results_can_be_merged(tmp_path):
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "e2e.json"
    assert main(["bench", "merge", str(path), "--output", str(tmp_path / "all.json")]) == 0
    tables = {table["name"]: table["rows"] for table in json.loads((tmp_path / "all.json").read_text())["tables"]}
    assert len(tables["steps"]) == len({tuple(row[:2]) for row in tables["steps"]}) > 30 and len(tables["kinds"]) > 30


def test_what_cannot_be_measured_is_refused(tiny_yaml, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.json").write_text('{"format": "another"}')
    assert main(["bench", "merge", "x.json", "--output", "y.json"]) == 2
    assert "is no JSON of `vmonarch bench e2e`" in capsys.readouterr().err
    monkeypatch.setattr(e2e, "memory_bytes", lambda: 2**16)
    for words, problem in (
        (["--model", tiny_yaml, "--settings", "5x32x64"], "--device cpu has not the memory for"),
        (["--model", tiny_yaml], "--settings must be given with --model"),
        (["--settings", "61x448x832"], "--settings must be of 1.3b-61x448x832"),
        (["--modes", "slow"], "--modes must be of eager, compiled"),
        (["--methods", "full", "full"], "--methods must be one or several different ones"),
        (["--methods", "vmonarch:dense_steps=99"], "'vmonarch:dense_steps=99' cannot compute this video"),
    ):
        assert main(["bench", "e2e", "--device", "cpu", "--output", "y.json", *words]) == 2
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "y.json").exists()


def test_the_settings_are_those_of_the_paper():
    grids = {}
    for setting in e2e.choose_settings(None, None):
        model = read_model(setting.model)
        grids[setting.label] = (tuple(setting.grid(model)), model.transformer["num_attention_heads"])
    assert grids == {
        "1.3b-61x448x832": ((16, 28, 52), 12),
        "1.3b-141x448x832": ((36, 28, 52), 12),
        "1.3b-61x720x1280": ((16, 45, 80), 12),
        "14b-93x704x1280": ((24, 44, 80), 40),
        "5b-93x704x1280": ((24, 22, 40), 24),
    }
    assert [setting.label for setting in e2e.choose_settings(None, None, quick=True)] == ["1.3b-61x448x832"]
