"""What was learnt survives saving and loading, exactly; whatever does not fit is an error that names it."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import vmonarch
from vmonarch import BasedProcessor, load_adapter, save_adapter

LAYERS = ["both", "window"]
WEIGHT = "transformer.blocks.0.attn1.processor.linear.key_weight"
LORA = "transformer.blocks.1.attn1.to_q.lora_B.weight"


def adapted(tiny, kind="t2v", *, lora=True, **options):
    """A pipeline that learnt something, and its video."""
    pipe = tiny.pipeline(kind)
    for model in tiny.transformers_of(pipe) if lora else ():
        model.add_adapter(LoraConfig(r=2, lora_alpha=3, target_modules=["to_q", "to_out.0"]))
    vmonarch.apply(pipe, BasedProcessor(**{"layers": LAYERS, "feature_dim": 8, "decay": True} | options))
    for model in tiny.transformers_of(pipe):
        tiny.jitter(model)
    return pipe, tiny.generate(pipe)


@pytest.fixture
def saved(tiny, tmp_path):
    """(file, the video it stands for)."""
    pipe, video = adapted(tiny)
    save_adapter(pipe, tmp_path / "adapter.safetensors")
    return tmp_path / "adapter.safetensors", video


@pytest.fixture
def file(saved):
    return saved[0]


def rewrite(file, change=lambda tensors: None, entry=lambda entry: None):
    """Damage an adapter file."""
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    tensors, values = load_file(file), json.loads(metadata["vmonarch_adapter"])
    change(tensors)
    entry(values)
    metadata["vmonarch_adapter"] = json.dumps(values)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize("kind, lora", [("t2v", False), ("t2v-2.2", True)])
def test_a_pipeline_goes_through_a_file(tiny, tmp_path, kind, lora):
    pipe, expected = adapted(tiny, kind, lora=lora)
    save_adapter(pipe, tmp_path / "adapter.safetensors")
    fresh = tiny.pipeline(kind)
    stock = tiny.generate(fresh)
    names_of = lambda pipe: [set(model.state_dict()) for model in tiny.transformers_of(pipe)]
    before = names_of(fresh)
    fresh.transformer.blocks[0].ffn.requires_grad_(False)
    flags = [(p, p.requires_grad) for p in fresh.transformer.parameters()]
    installation = load_adapter(fresh, tmp_path / "adapter.safetensors")
    assert torch.equal(tiny.generate(fresh), expected) and not torch.equal(stock, expected)
    assert names_of(fresh) == [{name.replace(".default.", ".vmonarch.") for name in names} for names in names_of(pipe)]
    processor = fresh.transformer.blocks[0].attn1.processor.spec
    assert processor.config == pipe.transformer.blocks[0].attn1.processor.spec.config
    assert all(p.requires_grad for n, p in fresh.transformer.named_parameters() if ".processor." in n or ".lora_" in n)
    assert all(p.requires_grad == flag for p, flag in flags)
    assert list(installation.transformers) == (["transformer"] if kind == "t2v" else ["transformer", "transformer_2"])
    save_adapter(fresh, tmp_path / "again.safetensors")
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("adapter", "again"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    vmonarch.restore(fresh)
    assert names_of(fresh) == before and torch.equal(tiny.generate(fresh), stock)


def test_the_lora_part_is_diffusers_own(tiny, file):
    layers = {name: tensor for name, tensor in load_file(file).items() if ".lora_" in name}
    with safe_open(file, "pt") as opened:
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert settings["transformer.r"] == 2 and settings["transformer.lora_alpha"] == 3
    stock = tiny.pipeline("t2v")
    stock.load_lora_weights(dict(layers))
    for name, tensor in layers.items():
        name = name.removeprefix("transformer.").replace(".weight", ".default_0.weight")
        assert torch.equal(stock.transformer.state_dict()[name], tensor)


# ---------------------------------------------------------------------------------------------- files that do not fit


def add(name, shape=(2,)):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


DAMAGE = {
    "missing": ({"change": lambda tensors: tensors.pop(WEIGHT)}, f"missing: {WEIGHT}$"),
    "shape": ({"change": add(WEIGHT, (2, 7, 12))}, r"of another shape: .*key_weight \(2, 7, 12\) \(here \(2, 8"),
    "unexpected-lora": ({"change": add(LORA.replace("to_q", "to_k"))}, r"unexpected: .*attn1\.to_k\.lora_B"),
    "lora-shape": ({"change": add(LORA, (24, 3))}, r"of another shape: .*lora_B.weight \(24, 3\) \(here \(24, 2\)\)"),
    "version": ({"entry": lambda e: e.update(version=2)}, "an adapter of version 2, supported: 1"),
    "processor": ({"entry": lambda e: e.update(processor="Other")}, "is for Other, supported: BasedProcessor"),
    "no-config": ({"entry": lambda e: e.pop("config")}, "damaged vmonarch_adapter"),
    "model-depth": (
        {"entry": lambda e: e["transformers"]["transformer"].update(num_layers=30)},
        r"another model than transformer: num_layers 30 \(here 2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_named_and_changes_nothing(tiny, file, name):
    damage, message = DAMAGE[name]
    rewrite(file, **damage)
    pipe = tiny.pipeline("t2v")
    stock, before = tiny.generate(pipe), set(pipe.transformer.state_dict())
    with pytest.raises(ValueError, match=message):
        load_adapter(pipe, file)
    assert set(pipe.transformer.state_dict()) == before and torch.equal(tiny.generate(pipe), stock)
    assert not getattr(pipe.transformer, "peft_config", None)


def test_files_that_are_no_adapters_are_refused(tiny, tmp_path):
    model = tiny.transformer()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_adapter(model, tmp_path / "nowhere.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match="no adapter that vmonarch.save_adapter wrote"):
        load_adapter(model, tmp_path / "lora.safetensors")
    (tmp_path / "text.safetensors").write_text("nothing")
    with pytest.raises(ValueError, match="text.safetensors is no complete safetensors file"):
        load_adapter(model, tmp_path / "text.safetensors")
    assert not [name for name in model.state_dict() if "processor" in name]


def test_what_cannot_be_saved_is_named(tiny, tmp_path):
    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="transformer has no processor with parameters"):
        save_adapter(tiny.pipeline("t2v"), file)
    pipe = tiny.pipeline("t2v-2.2")
    vmonarch.apply(pipe.transformer, BasedProcessor(feature_dim=8))
    with pytest.raises(ValueError, match="transformer_2 has no processor with parameters"):
        save_adapter(pipe, file)
    vmonarch.apply(pipe.transformer_2, BasedProcessor(feature_dim=4))
    with pytest.raises(ValueError, match="transformer and transformer_2 have different processors"):
        save_adapter(pipe, file)
    model = pipe.transformer
    with torch.no_grad():
        model.blocks[0].attn1.processor.linear.log_weight.fill_(1e6)
    with pytest.raises(ValueError, match="dtype=torch.float16 is too narrow for .*log_weight"):
        save_adapter(model, file, dtype=torch.float16)
    for name in ("one", "two"):
        model.add_adapter(LoraConfig(r=1, target_modules=["to_k"]), adapter_name=name)
    scaled = adapted(tiny)[0].transformer
    scaled.set_adapters("default", 0.5)
    with pytest.raises(ValueError, match="attn1.to_q has LoRA with another weight than 1"):
        save_adapter(scaled, file)
    changing_weights = tiny.transformer()
    changing_weights.add_adapter(LoraConfig(r=1, target_modules=["to_k"], init_lora_weights="pissa"))
    vmonarch.apply(changing_weights, BasedProcessor(feature_dim=8))
    for other, names in ((model, "one, two"), (changing_weights, "default")):
        with pytest.raises(ValueError, match=f"transformer must have one adapter of plain LoRA, .* got {names}"):
            save_adapter(other, file)
    assert not file.exists()
