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


def test_without_an_adapter_the_error_says_what_to_do(cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vmonarch.pipelines.embedded as embedded

    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded" / "__init__.py"))
    advice = "give adapter=FILE of vmonarch.save_adapter, or adapter=null"
    code, _, err = cli("generate", PROMPT, "--attention", "based")
    assert code == 2 and "vmonarch finetune --config embedded-based" in err and advice in err
    code, _, err = cli("generate", PROMPT, "--attention", "based:adapter=nowhere.safetensors")
    assert code == 2 and "'nowhere.safetensors' cannot be used: [Errno 2] No such file" in err and advice in err


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
