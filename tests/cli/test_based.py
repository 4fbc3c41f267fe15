"""`--attention based`: the adapter decides, is recorded, and goes again with the method."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.pipelines.config import GenerateConfig, complete
from vmonarch.pipelines.loading import load_model
from vmonarch.pipelines.model_folder import find_model

PROMPT = "a red circle moving right"


@pytest.fixture(scope="module")
def pipe(tiny_model: Path):
    folder = find_model(str(tiny_model))
    return load_model(complete(GenerateConfig(prompts=(PROMPT,), model=str(tiny_model)), folder), folder).pipe


def test_the_shipped_adapter_makes_videos_that_can_be_made_again(cli, shipped_adapter: Path) -> None:
    assert cli("generate", PROMPT, "--seed", 1, "--quiet")[0] == 0
    code, _, err = cli("generate", PROMPT, "--seed", 1, "--attention", "based", "--quiet")
    assert code == 0, err
    full, based = cli.records()
    assert based["config"]["attention"]["adapter"] == "embedded"
    assert len(based["config"]["attention"]["adapter_sha256"]) == 64
    assert based["frames_sha256"] != full["frames_sha256"]
    path = f"outputs/generate/{based['video'].replace('.mp4', '.json')}"
    assert cli("generate", "--from-json", path, "--quiet", tiny=False)[0] == 0
    assert cli.records()[2]["frames_sha256"] == based["frames_sha256"]


def test_an_adapter_at_home_is_recorded_by_a_path_that_is_right_in_every_folder(
    tiny_adapter: Path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tiny_adapter.parent))
    monkeypatch.chdir(tiny_adapter.parent)
    for word in ("~/based.safetensors", "based.safetensors"):
        method = resolve_method(f"based:adapter={word}")
        assert method.to_dict()["adapter"] == str(tiny_adapter) and word in method.label


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
        "data.workers=0",
        "data.validation=null",
        "trackers=[]",
    ]
    for line in (
        ["preprocess", "--procedural", 1, "--model", cli.model, "--output", "clips", *size],
        ["finetune", "--config", "embedded-based", f"model={cli.model}", "data.path=clips", *steps, *short],
        ["export", "outputs/finetune-based", "--output", "based.safetensors", "--dtype", "float16"],
    ):
        code, _, err = cli(*line, tiny=False)
        assert code == 0, err
    code, _, err = cli("generate", PROMPT, "--attention", "based:adapter=based.safetensors")
    assert code == 0, err
    (record,), file = cli.records(), tmp_path / "based.safetensors"
    assert record["config"]["attention"]["adapter"] == str(file)
    save_file(load_file(file), file)
    path = f"outputs/generate/{record['video'].replace('.mp4', '.json')}"
    code, _, err = cli("generate", "--from-json", path, "--quiet", tiny=False)
    assert code == 2 and "attention.adapter" in err and "is not the file that it was" in err


def test_compare_gives_full_attention_its_own_weights(cli, shipped_adapter: Path) -> None:
    assert cli("generate", PROMPT, "--seed", 1, "--attention", "full", "--quiet")[0] == 0
    code, _, err = cli("compare", PROMPT, "--seed", 1, "--methods", "based", "full", "vmonarch", "--quiet")
    assert code == 0, err
    (name,) = cli.outputs("outputs/compare")
    (record,) = cli.records(f"outputs/compare/{name}")
    frames = {result["method"]: result["frames_sha256"] for result in record["items"][0]["results"]}
    # Nothing of the adapter is left, its LoRA layers neither, when another method runs.
    assert frames["full"] == cli.records()[0]["frames_sha256"]
    assert set(frames) == {"based", "full", "vmonarch"} and len(set(frames.values())) == 3


def test_without_an_adapter_the_error_says_what_to_do(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vmonarch.pipelines.embedded as embedded

    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded" / "__init__.py"))
    advice = "give adapter=FILE of vmonarch.save_adapter, or adapter=null"
    code, _, err = cli("generate", PROMPT, "--attention", "based")
    assert code == 2 and "vmonarch finetune --config embedded-based" in err and advice in err
    code, _, err = cli("generate", PROMPT, "--attention", "based:adapter=nowhere.safetensors")
    assert code == 2 and "'nowhere.safetensors' cannot be used: [Errno 2] No such file" in err and advice in err


def test_an_adapter_of_another_model_is_refused(cli, shipped_adapter: Path, tiny_image_model: Path, tmp_path) -> None:
    from PIL import Image

    Image.new("RGB", (48, 32), "red").save(tmp_path / "image.png")
    line = ["--image", tmp_path / "image.png", "--attention", "based"]
    code, _, err = cli("generate", PROMPT, *line, model=tiny_image_model)
    assert code == 2 and "is for another model than transformer: " in err and "in_channels 16 (here 36)" in err, err
    assert "Based has to be trained for a model: give adapter=FILE" in err


def test_untrained_parameters_have_to_be_asked_for(pipe) -> None:
    method = resolve_method("based:adapter=null,feature_dim=4,layers=[both, conv],window=[1, 3, 3],dense_steps=1")
    assert resolve_method(method.to_dict()) == method
    method.install(pipe)
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    assert [processor.kind for processor in processors] == ["both", "conv"]
    assert processors[0].spec.config["feature_dim"] == 4 and processors[0].spec.dense_steps == 1
    assert method.without_dense().options["dense_steps"] == 0
    resolve_method("full").install(pipe)
    assert not any(".processor." in name for name in pipe.transformer.state_dict())


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("layers=linaer", "attention.layers must be based, one of linear"),
        ("feature_dim=wide", "attention.feature_dim must be"),
        ("window=[3, 3]", "attention.window must"),
        ("rank=8", "attention.rank is no known key"),
    ],
)
def test_bad_options_are_named(option: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_method(f"based:adapter=null,{option}")
