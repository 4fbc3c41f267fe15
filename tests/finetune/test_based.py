"""The finetune of Based on the embedded model: its fast form is the processor's, it learns, and writes what loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from safetensors import safe_open

import vmonarch
from vmonarch import BasedProcessor, LatentGrid
from vmonarch.finetune.embedded import based, transformer
from vmonarch.finetune.embedded.based import BasedSettings, Trainer
from vmonarch.pipelines.embedded import embedded_adapter_path, embedded_model_path

TINY = {**transformer.TRANSFORMER_CONFIG, "num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64,
        "num_layers": 2}  # fmt: skip


@pytest.fixture(scope="module")
def embedded() -> WanPipeline:
    return WanPipeline.from_pretrained(embedded_model_path())


@pytest.fixture
def make_trainer(embedded):
    def make(**settings) -> Trainer:
        torch.manual_seed(0)
        model = WanTransformer3DModel(**TINY)
        for name, parameter in model.named_parameters():
            if "norm_q" in name or "norm_k" in name:
                torch.nn.init.normal_(parameter, 1.5, 0.5)
        pipe = SimpleNamespace(
            tokenizer=embedded.tokenizer, text_encoder=embedded.text_encoder, vae=embedded.vae, transformer=model
        )
        values = {"rank": 4, "feature_dim": 8, "window": (1, 3, 3), "batch": 2, "transfer_steps": 20, "steps": 20}
        trainer = Trainer(pipe, BasedSettings(**values | settings), device="cpu", compile=False)
        trainer.latents = torch.randn(4, 16, 3, 4, 6).half()
        trainer.held_out = torch.randn(2, 16, 3, 4, 6).half()
        trainer.tokens = torch.randint(2, 100, (4, 3, 12))
        trainer.held_out_text = trainer._encode(trainer.tokens[:2, 0])
        trainer.place_teacher()
        return trainer

    return make


def learn_something(trainer) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.own:
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("window", [(1, 3, 3), (2, 2, 9)], ids=str)
@pytest.mark.parametrize("decay", [False, True], ids=["no-decay", "decay"])
@pytest.mark.parametrize("layers", ["linear", "window", "both", "conv"])
def test_what_trains_fast_is_what_the_processor_computes(make_trainer, layers, decay, window):
    trainer = make_trainer(layers=layers, decay=decay, window=window)
    learn_something(trainer)
    student = trainer.student.double()
    batch = [x.double() for x in trainer.draw(0)]
    leaves = [*trainer.own, student.blocks[0].attn1.to_q.base_layer.bias.requires_grad_()]

    def results():
        loss = transformer.flow_matching_loss(student, *batch)
        return [loss, *torch.autograd.grad(loss.sum(), leaves)]

    expected = results()
    with trainer.training_processors(transfer=False):
        kinds = {type(block.attn1.processor).__name__ for block in student.blocks}
        assert kinds == {"BasedLayer" if layers == "conv" else "DenseBased"}
        actual = results()
    assert all(isinstance(block.attn1.processor, based.BasedLayer) for block in student.blocks)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_large_logits_do_not_overflow(make_trainer):
    trainer = make_trainer()
    layer = trainer.student.blocks[0].attn1.processor
    q, k, v = (torch.randn(1, 2, 18, 24) * 40 for _ in range(3))
    with trainer.training_processors(transfer=False), torch.no_grad():
        out = trainer.student.blocks[0].attn1.processor.attend(q, k, v)
    expected = layer.attend(*(x.transpose(1, 2) for x in (q, k, v)), LatentGrid(3, 2, 3))
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=1e-4, atol=1e-3)


def test_transfer_sees_exact_attention_and_compares_every_layer_with_it(make_trainer):
    trainer = make_trainer()
    batch = trainer.draw(0)
    outputs = {}
    for number, block in enumerate(trainer.teacher.blocks):
        block.attn1.register_forward_hook(lambda _, args, out, number=number: outputs.update({number: (args, out)}))
    expected = transformer.velocity(trainer.teacher, *batch)
    with trainer.training_processors(transfer=True) as transfers:
        torch.testing.assert_close(transformer.velocity(trainer.student, *batch), expected)
        losses = [transfer.loss for transfer in transfers]
    for number, loss in enumerate(losses):
        (states, _, _, rotary), exact = outputs[number]
        layer = trainer.student.blocks[number].attn1
        ours = layer(states, None, None, rotary)
        torch.testing.assert_close(loss, (ours - exact).square().mean() / exact.var(), rtol=1e-4, atol=1e-6)
    # One layer's loss teaches that layer alone.
    gradients = torch.autograd.grad(losses[1], trainer.own, allow_unused=True)
    own = {id(p) for p in trainer.student.blocks[1].attn1.processor.parameters()}
    assert [gradient is not None for gradient in gradients] == [id(p) in own for p in trainer.own]


def test_both_stages_learn_what_they_are_for_and_nothing_else(make_trainer):
    trainer = make_trainer()
    before = {name: p.detach().clone() for name, p in trainer.student.named_parameters()}
    errors = [trainer.measure()["velocity_error"]]

    def changed():
        after = dict(trainer.student.named_parameters())
        return {name for name in before if not torch.equal(after[name], before[name])}

    trainer.transfer(float("inf"))
    assert changed() == {name for name in before if ".processor." in name}
    assert trainer.log[-1]["stage"] == "transfer" and trainer.log[-1]["step"] == 20
    trainer.finetune(float("inf"))
    assert changed() == {name for name in before if ".processor." in name or ".lora_" in name}
    errors.append(trainer.measure()["velocity_error"])
    assert set(errors[0]) == set(based.SIGMAS)
    assert sum(errors[1].values()) < sum(errors[0].values())


def test_transfer_makes_layers_alike(make_trainer):
    trainer = make_trainer(transfer_steps=100)

    @torch.no_grad()
    def difference():
        batch = trainer.draw(10**6)
        with trainer.training_processors(transfer=True) as transfers:
            transformer.velocity(trainer.student, *batch)
        return sum(transfer.loss for transfer in transfers)

    before = difference()
    trainer.transfer(float("inf"))
    assert difference() < 0.8 * before


def test_velocities_of_equal_models_are_equal(make_trainer):
    trainer = make_trainer(layers="window", window=(5, 3, 5))
    results = trainer.measure()
    assert max(results["velocity_error"].values()) < 1e-5
    for level in based.SIGMAS:
        assert results["flow_loss"][level] == pytest.approx(results["flow_loss_exact"][level], rel=1e-5)


def test_a_time_limit_ends_a_stage_early(make_trainer):
    trainer = make_trainer(steps=100_000)
    trainer.finetune(1e-9)
    assert trainer.log[-1]["step"] == 1


def test_an_adapter_too_big_for_the_package_is_refused(make_trainer):
    with pytest.raises(ValueError, match="rank=2000 makes .* bytes of adapter, more than 2097152"):
        make_trainer(rank=2000)


@pytest.mark.slow
def test_the_command_writes_an_adapter_that_the_embedded_model_loads(tmp_path, monkeypatch):
    # Measuring at all noise levels takes longer than everything else.
    monkeypatch.setattr(based, "SIGMAS", based.SIGMAS[:1])
    output = tmp_path / "new" / "based.safetensors"
    line = ["--quick", "--device", "cpu", "--output", str(output), "--layers", "both"]
    assert based.main(line) == 0
    assert output.stat().st_size <= 2 * 2**20
    report = json.loads(output.with_suffix(".json").read_text())
    assert report["bytes"] == output.stat().st_size
    assert {entry["stage"] for entry in report["log"]} == {"transfer", "finetune"}
    stages = ("untrained", "transferred", "finetuned")
    assert all(set(report["validation"][stage]) >= {"velocity_error", "flow_loss"} for stage in stages)
    pipe = WanPipeline.from_pretrained(embedded_model_path())
    vmonarch.load_adapter(pipe, output)
    assert pipe.transformer.blocks[0].attn1.processor.config == BasedProcessor().config
    assert list(pipe.transformer.peft_config) == ["vmonarch"]
    # Nothing is overwritten, and a run that could not be saved does not start.
    with pytest.raises(SystemExit):
        based.main(line)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clips", "0"], "--clips must be positive"),
        (["--rank", "-1"], "--rank must be at least 0"),
        (["--feature-dim", "0"], "--feature-dim must be positive"),
        (["--distillation", "2"], "--distillation must lie between 0 and 1"),
        (["--model", "/nowhere"], "--model must be the folder of a pipeline"),
        (["--output", "x.pt"], "--output must end with .safetensors"),
        (["--layers", "window"], "--layers must be linear, both, conv or based"),
    ],
    ids=["clips", "rank", "feature-dim", "distillation", "model", "output", "layers"],
)
def test_the_command_refuses_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        based.main(["--output", str(tmp_path / "new" / "x.safetensors"), *arguments])
    assert message in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_lora_layers_need_peft(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(based.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        based.main(["--output", str(tmp_path / "x.safetensors")])
    assert "--rank needs PEFT" in capsys.readouterr().err


def test_the_shipped_adapter_fits_the_embedded_model_and_is_small():
    try:
        file = embedded_adapter_path()
    except FileNotFoundError:
        pytest.skip("no adapter ships yet")
    assert file.stat().st_size <= 2 * 2**20
    with safe_open(file, "pt") as opened:
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.float16}
    pipe = WanPipeline.from_pretrained(embedded_model_path())
    vmonarch.load_adapter(pipe, file)
