"""The benchmarks of whole models: what they measure and extrapolate, what they record of failures, what they refuse.

Models of `configs/models.yaml` are what they are named after, and random weights stand as loaded ones would.
"""

import collections
import copy
import json
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.attention import FeedForward
from transformers import UMT5Config, UMT5EncoderModel

from vmonarch.attend import Op
from vmonarch.cli import main
from vmonarch.configs import InputError, preset_names
from vmonarch.eval.bench import e2e
from vmonarch.eval.bench.runner import Way, run_bench, wrong_rows
from vmonarch.eval.wan_models import UMT5_XXL, read_model
from vmonarch.hooks import record_of
from vmonarch.kernels.common.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1 when triton is imported")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def document(tiny_yaml, tmp_path_factory):
    """What one run of the command wrote."""
    output = tmp_path_factory.mktemp("e2e") / "e2e.json"
    words = ["bench", "e2e", "--model", tiny_yaml, "--settings", "5x32x64", "--rounds", "2", "--steps", "30"]
    words += ["--methods", "full", "vmonarch"]
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


def test_dense_steps_a_cache_and_a_second_transformer_count(measure, monkeypatch, tiny_yaml, tmp_path):
    # What each step of a row calls.
    calls, by_row, make = collections.Counter(), collections.defaultdict(dict), e2e.Steps.of

    def count(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **b: calls.update([owner.__name__]) or original(*a, **b))

    def watched(*inputs):
        pipe = make(*inputs)

        def note(*_):
            by_row[pipe][pipe.step] = dict(calls)
            calls.clear()

        pipe.transformer.register_forward_hook(note)
        return pipe

    count(Op, "__call__")
    count(FeedForward, "forward")
    monkeypatch.setattr(e2e.Steps, "of", watched)
    path = tmp_path / "two.yaml"
    path.write_text(Path(tiny_yaml).read_text() + "boundary_ratio: 0.875\n")
    eight = "vmonarch:refresh={{steps: {}, precision: int8}}"
    methods = (eight.format(1), "vmonarch:dense_steps=1", eight.format("1.0, cache: 9.0"))
    rows = measure(*methods, steps=8, model=str(path), guidance=False)
    counts = [{kind: of["steps"] for kind, of in row["kinds"].items()} for row in rows.values()]
    assert counts[:2] == [{"kept": 1, "kept, int8": 1, "approximate": 6}, {"dense": 1, "approximate": 7}]
    # Two outputs and an error come first, then intervals of twice the last, and the last step.
    assert counts[2] == {"exact": 1, "exact, int8": 4, "predicted": 3}
    assert not any(record_of(pipe.transformer).sharing._branches for pipe in list(by_row)[::2])
    _, dense, predicting = by_row.values()
    whole = {"FeedForward": 2, "Op": 2}
    assert dense == {0: {"FeedForward": 2}, 1: whole}
    assert [step for step, called in predicting.items() if called] == [0, 1, 2, 4, 7]


def test_the_first_step_is_also_measured_where_nothing_is_compiled(measure, forkserver, monkeypatch):
    caches, seen = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"), []
    for name in caches:
        monkeypatch.setenv(name, "full")
    way = Way(lambda: seen.extend(os.listdir(os.environ[name]) for name in caches))
    assert e2e.first_call(lambda *of: {"cold": lambda: way}, None, CPU) > 0 and seen == [[], []]
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: forkserver)
    (row,) = measure("vmonarch-t1:exact=null,refresh=2", cold=True).values()
    assert 0 < row["cold_s"] < 60, row


def test_tables_hold_ratios_of_one_run_and_the_last_row_that_has_times(document, tmp_path):
    first = copy.deepcopy(document)
    case = first["runs"][0]["cases"][0]
    for row, step, gigabytes in zip(case["rows"], (4.0, 3.0, 2.5, 1.0), (4, 3, 4, 3.5), strict=True):
        row.update(step_s={"median": step}, denoise_s=step, video_s=2 * step, peak_bytes=gigabytes * 1e9)
    name = case["setting"]
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


# Parameters of the published weights: of one transformer, and of the VAE.
PUBLISHED = {
    "wan2.1-1.3b": (1_418_996_800, 126_892_531),
    "wan2.1-14b": (14_288_491_584, 126_892_531),
    "wan2.2-5b": (4_999_787_712, 704_688_668),
    "wan2.2-a14b": (14_288_491_584, 126_892_531),
}


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", preset_names("models"))
def test_shipped_models_are_those_they_are_named_after(name):
    model = read_model(name)
    latents = model.latents((5, 64, 96), argument="size")
    with torch.device("meta"):
        found = WanTransformer3DModel(**model.transformer), AutoencoderKLWan(**model.vae)
        video = found[1].decode(torch.empty(1, model.transformer["out_channels"], *latents), return_dict=False)[0]
        assert parameters(UMT5EncoderModel(UMT5Config(**UMT5_XXL))) == 5_680_910_336
    assert tuple(map(parameters, found)) == PUBLISHED[name]
    assert video.shape == (1, 3, 5, 64, 96), "the VAE must compress as much as the latent grid says"
    assert model.transformers == (("transformer", "transformer_2") if "a14b" in name else ("transformer",))
    assert model.expand_timesteps == (name == "wan2.2-5b")


def test_a_pipelines_folder_brings_its_own_weights(tiny, tmp_path):
    pipe = tiny.pipeline("t2v-2.2")
    pipe.save_pretrained(tmp_path / "pipe")
    model = read_model(str(tmp_path / "pipe"))
    assert (model.name, model.boundary_ratio) == ("pipe", 0.9)
    assert model.latents((9, 32, 48), argument="size") == (3, 4, 6)
    of = {"transformer": "proj_out", "transformer_2": "proj_out", "vae": "decoder.conv_in", "text_encoder": "shared"}
    for part, name in of.items():
        loaded = model.build(part, CPU, torch.float32)
        assert torch.equal(loaded.get_submodule(name).weight, getattr(pipe, part).get_submodule(name).weight)


def test_a_bad_config_is_refused_by_key(tmp_path):
    (tmp_path / "bad.yaml").write_text("heads: 2")
    with pytest.raises(InputError, match="^model .*unexpected keyword argument 'heads'"):
        read_model(str(tmp_path / "bad.yaml"))
