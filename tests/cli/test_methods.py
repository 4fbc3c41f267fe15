"""The registry of attention methods: every name that ships works, says what it does, and takes its adapter along."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny_wan
from safetensors.torch import load_file, save_file

from vmonarch import BasedProcessor, VMonarchProcessor
from vmonarch.configs import FOLDER, InputError, parse_override, preset_names, presets, read_yaml
from vmonarch.configs.methods import merge_attention, resolve_method
from vmonarch.eval.calibrate.run import CalibrateConfig
from vmonarch.eval.evaluate import EvalConfig
from vmonarch.eval.settings import CompareConfig
from vmonarch.eval.wan_models import read_model_config
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.finetune.data.preprocess import PreprocessConfig
from vmonarch.pipelines.config import GenerateConfig, SamplingConfig, build_config


@pytest.fixture(scope="module")
def pipe(tiny_model: Path):
    return tiny_wan.load(tiny_model).pipe


@pytest.mark.parametrize("name", preset_names("attention"))
def test_every_method_installs_what_it_says(name: str, pipe, shipped_adapter: Path) -> None:
    method = resolve_method(name)
    assert method.label == method.name == name and resolve_method(method.to_dict()) == method
    method.install(pipe)
    block = pipe.transformer.blocks[0]
    processor = block.attn1.processor
    assert (method.processor_name == "based") == any(".lora_" in key for key in pipe.transformer.state_dict())
    if method.processor_name == "full":
        assert type(processor) is type(block.attn2.processor)
    elif method.processor_name == "based":
        assert isinstance(processor.spec, BasedProcessor)
    else:
        spec = processor.spec
        assert type(spec) is type(method.processor()) and spec.config == method.processor().config


def test_names_and_options_in_them_mean_what_they_say() -> None:
    general = {"full": None, "vmonarch": 2, "vmonarch-t1": 1, "vmonarch-t3": 3, "vmonarch-band1": 2}
    assert {name: resolve_method(name).to_dict().get("num_iterations") for name in general} == general
    assert resolve_method("vmonarch-band1").to_dict()["exact"] == {"band": 1}
    method = resolve_method("vmonarch:num_iterations=3,coarse=2,exact={rows: [0], band: 1},dense_steps=0.25")
    expected = VMonarchProcessor(num_iterations=3, coarse=2, exact={"rows": [0], "band": 1}, dense_steps=0.25)
    assert method.processor().config == expected.config and method.name == "vmonarch"
    assert method.label.startswith("vmonarch:") and resolve_method("vmonarch:").label == "vmonarch"


def test_a_value_is_the_same_in_a_file_and_in_an_override(tmp_path: Path) -> None:
    wanted = {"1e-6": 1e-6, "{b: [-2E3, .5, 1_000]}": {"b": [-2e3, 0.5, 1000]}, "1.2.3e4": "1.2.3e4", "": None}
    # No date, and nothing that is put in.
    wanted |= {text: text for text in ("2026-02-30", "${HOME}", "a=b")}
    for text, value in wanted.items():
        (tmp_path / "a.yaml").write_text(f"x: {text}", encoding="utf-8")
        assert read_yaml(str(tmp_path / "a.yaml"), "generate") == parse_override(f"x={text}") == {"x": value}
    assert parse_override("a-b.c=1") == {"a_b": {"c": 1}}


def test_options_after_the_name_are_those_of_one_word(tiny_adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `attention=based attention.adapter=FILE`, where no adapter ships, and over a record of another adapter.
    shipped = resolve_method(f"based:adapter={tiny_adapter}").to_dict() | {"adapter_sha256": "of another"}
    monkeypatch.setattr("vmonarch.pipelines.embedded.embedded_adapter_path", lambda: Path("nowhere"))
    for below in ("based", shipped):
        words = merge_attention(below, {"adapter": str(tiny_adapter)})
        assert resolve_method(words).options == resolve_method(f"based:adapter={tiny_adapter}").options
    words = merge_attention(merge_attention("vmonarch:coarse=2,exact.rows=[0]", {"exact": {"band": 1}}), {"coarse": 4})
    assert resolve_method(words).label == "vmonarch:coarse=4,exact={'rows': [0], 'band': 1}"


# What the commands make of the presets in each file of `configs/`. (Plans are JSON: see test_plan.py.)
PROMPT = {"prompts": ["a red circle"]}
VIDEOS = {"videos": "clips", "captions": "captions.jsonl", "output": "data"}
READERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "calibrate": (CalibrateConfig, PROMPT),
    "compare": (CompareConfig, PROMPT),
    "eval": (EvalConfig, {}),
    "finetune": (FinetuneConfig, {}),
    "generate": (GenerateConfig, PROMPT),
    "preprocess": (PreprocessConfig, VIDEOS),
    "defaults": (SamplingConfig, PROMPT),
}


def test_every_preset_is_read_names_a_model_that_there_is_and_says_what_it_is_for() -> None:
    groups = {path.stem for path in FOLDER.glob("*.yaml")}
    assert groups == {*READERS, "attention", "recipes", "models"}
    for group, (schema, more) in READERS.items():
        for name, values in presets(group).items():
            model = getattr(build_config(schema, values, more), "model", "embedded")
            assert model == "embedded" or re.fullmatch(r"[\w.-]+/[\w.-]+", model), f"{group}/{name}: {model!r}"
    for name in preset_names("models"):
        assert read_model_config(name).name == name
    for group in groups:
        assert preset_names(group) == sorted(presets(group))
        paragraphs = (FOLDER / f"{group}.yaml").read_text(encoding="utf-8").split("\n\n")
        assert all(paragraph.startswith("# ") and "\n  " in paragraph for paragraph in paragraphs[1:])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ('coarse="???"', "coarse must be a positive integer, got '"),
        ("exact.bnd=1", "exact.bnd is no known key; known: rows, columns, band, aware"),
        ("refesh=3", r"refesh is no known key \(did you mean refresh\?\); known: num_iterations"),
        ("adapter=embedded", "adapter is no known key; known: num_iterations"),
        ("plan=nowhere.json", "plan 'nowhere.json' cannot be read"),
        ("processor=based", "processor must be 'vmonarch' here, got 'based'"),
    ],
)
def test_an_option_that_the_processor_refuses_is_named(options: str, problem: str) -> None:
    with pytest.raises(InputError, match=f"^attention.{problem}"):
        resolve_method(f"vmonarch:{options}")


def test_an_adapter_at_home_is_recorded_by_a_path_that_is_right_in_every_folder(
    tiny_adapter: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_adapter.parent))
    monkeypatch.chdir(tiny_adapter.parent)
    for word in ("~/based.safetensors", "based.safetensors"):
        method = resolve_method(f"based:adapter={word}")
        assert method.to_dict()["adapter"] == str(tiny_adapter) and word in method.label


@pytest.mark.deep
def test_the_preset_trains_an_adapter_that_videos_are_made_with_until_it_changes(
    cli, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    size = ["height=96", "width=160", "num_frames=61"]
    steps = ["steps=3", "transfer=2", "optimizer.warmup=0"]
    short = [
        "attention.feature_dim=8",
        "batch_size=1",
        "micro_batch=1",
        "precision=fp32",
        "data.validation=null",
        "trackers=[]",
    ]
    for line in (
        ["preprocess", "--procedural", 1, "--model", cli.model, "--output", "clips", *size],
        ["finetune", "--config", "embedded-based", f"model={cli.model}", "data.path=clips", *steps, *short],
        ["export", "outputs/finetune-based", "--output", "based.safetensors", "--dtype", "float16"],
    ):
        cli.done(*line, tiny=False)
    cli.done("generate", "a red circle", "--attention", "based:adapter=based.safetensors")
    (record,), file = cli.records(), tmp_path / "based.safetensors"
    assert record["config"]["attention"]["adapter"] == str(file)
    save_file(load_file(file), file)
    path = f"outputs/generate/{record['video'].replace('.mp4', '.json')}"
    code, _, err = cli("generate", "--from-json", path, "--quiet", tiny=False)
    assert code == 2 and "attention.adapter" in err and "is not the file that it was" in err


def test_without_an_adapter_the_error_says_what_to_do(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vmonarch.pipelines.embedded as embedded

    monkeypatch.setattr(embedded, "_folder", lambda: tmp_path)
    advice = "give adapter=FILE of vmonarch.save_adapter, or adapter=null"
    code, _, err = cli("generate", "a red circle", "--attention", "based")
    assert code == 2 and "based.safetensors" in err and advice in err
    code, _, err = cli("generate", "a red circle", "--attention", "based:adapter=nowhere.safetensors")
    assert code == 2 and "'nowhere.safetensors' cannot be used: [Errno 2] No such file" in err and advice in err


def test_without_the_package_of_the_embedded_model_the_error_says_what_to_install(cli, monkeypatch, tmp_path) -> None:
    import vmonarch.pipelines.embedded as embedded

    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded.py"))
    code, _, err = cli("generate", "a red circle", tiny=False)
    assert code == 1 and "'embedded' is the package vmonarch-embedded, which is not installed: pip install ./pi" in err
    assert "pip install ./pipelines/embedded_wheel" in cli.done("info", tiny=False)
    # Other models do without.
    cli.done("generate", "a red circle", "--quiet")


def test_options_go_with_the_adapter_or_are_refused(pipe, tiny_adapter: Path) -> None:
    fitting = f"based:adapter={tiny_adapter},feature_dim=8,layers=[both, linear],window=[1, 3, 3],dense_steps=[0]"
    resolve_method(fitting).install(pipe)
    assert pipe.transformer.blocks[1].attn1.processor.spec.dense_steps == (0,)
    for option, message in (
        ("feature_dim=4", "feature_dim is 8 in .*, got 4"),
        ("layers=both", "layers is .'both', 'linear'. in .*, got both"),
        ("window=[1, 5, 3]", r"window is \[1, 3, 3\] in .*, got \[1, 5, 3\]"),
        ("dense_layers=1", "dense_layers is 0 in .*, got 1"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_method(f"based:adapter={tiny_adapter},{option}").install(pipe)
