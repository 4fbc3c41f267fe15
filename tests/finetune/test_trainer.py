"""Training runs of tiny models: they resume exactly, stop before a bad update, and leave files that others load."""

import dataclasses
import math
import shutil
from itertools import islice

import diffusers
import pytest
import tiny_folders
import tiny_wan as tiny
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file

import vmonarch
from vmonarch.configs import InputError
from vmonarch.finetune.checkpoints import CheckpointError, newest, read, read_tensors, steps_in
from vmonarch.finetune.config import FinetuneConfig
from vmonarch.finetune.data.parquet import Sample, write_shard
from vmonarch.finetune.export import comfyui_name, export
from vmonarch.finetune.models import compile_blocks
from vmonarch.finetune.trainer import Trainer, TrainingError
from vmonarch.pipelines import config
from vmonarch.pipelines.config import build_config, recommended_settings
from vmonarch.pipelines.model_folder import find_model
from vmonarch.plan import AttentionPlan


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folders of data, and of tiny models once they are asked for."""
    folder = tmp_path_factory.mktemp("finetune")
    write_shard(folder / "clips" / "a.parquet", tiny.clips(0, 13))
    write_shard(folder / "held-out" / "a.parquet", tiny.clips(100, 5))
    write_shard(folder / "images" / "a.parquet", tiny.clips(0, 6, image=True))
    write_shard(folder / "huge" / "a.parquet", tiny.clips(0, 6, huge=3))
    return folder


def model(place, kind):
    folder = place / kind
    if not folder.exists():
        tiny_folders.save(kind, folder)
    return folder


def settings(place, output, kind="t2v", clips="clips", **changes):
    values = {
        "model": str(model(place, kind)),
        "output_dir": str(output),
        "steps": 6,
        "batch_size": 2,
        "precision": "fp32",
        "trackers": [],
        "log_every": 1,
        "gradient_checkpointing": False,
        "data": {"path": str(place / clips)},
        "optimizer": {"learning_rate": 1e-3},
        "validation": {"every": 0},
        "checkpoints": {"every": 100},
    }
    return build_config(FinetuneConfig, values, changes)


def weights(trainer):
    return {name: parameter.detach().clone() for name, parameter in trainer.trained.items()}


def average(trainer):
    return dict(zip(trainer.trained, trainer.average.shadow_params, strict=True))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Settings


DATA = {"data": {"path": "clips"}}
BAD = (
    ({"data": {"path": ""}}, "data.path is missing"),
    ({"data": {"bad_fraction": 0.1}}, "data.bad_fraction"),
    ({"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
    ({"attention": {"coarse": 0}}, "attention.coarse must be"),
    ({"attention": "near-lossless"}, "attention.refresh must be null, as residuals have no gradient"),
    ({"lora": {"rank": 4, "targets": []}}, "lora.targets must name at least one layer"),
    ({"sequence_parallel_size": 2, "validation": {"videos_every": 5}}, "videos_every must be 0 with"),
    ({"validation": {"videos_every": 5}}, "validation.prompts must hold a prompt"),
)


def test_bad_settings_are_named():
    for values, message in BAD:
        with pytest.raises(InputError, match=message):
            build_config(FinetuneConfig, DATA, values)


def test_the_learning_rate_warms_up_and_decays():
    for schedule, later in (("constant", [2.0, 2.0, 2.0]), ("cosine", [2.0, 1.0, 0.0])):
        options = {"learning_rate": 2.0, "schedule": schedule, "warmup": 4}
        config = build_config(FinetuneConfig, DATA, {"steps": 104, "optimizer": options})
        assert [config.learning_rate(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
        assert [config.learning_rate(step) for step in (4, 54, 104)] == pytest.approx(later)


# Runs


@pytest.mark.parametrize("kind", ["t2v", "t2v-2.2", "t2v-5b", "i2v-2.1"])
def test_a_resumed_run_is_the_same_run(place, tmp_path, kind):
    """Bit for bit, from within an epoch into the next, with optimizer, average, dropped captions and two experts."""
    options = {"steps": 12, "ema": 0.9, "attention": "vmonarch", "data": {"caption_dropout": 0.3}}
    # Both experts of the second are as likely with this shift.
    options |= {"objective": {"image_share": 0.5} if kind == "t2v-5b" else {"flow_shift": 9.0}}
    clips = "images" if kind == "i2v-2.1" else "clips"
    whole = Trainer(settings(place, tmp_path / "whole", kind, clips, **options))
    before = weights(whole)
    whole.run()
    found = tiny.logged(tmp_path / "whole")
    assert len(found) == 12 and all(map(math.isfinite, found.values()))
    moved = {name.split(".")[1] for name, value in weights(whole).items() if not torch.equal(value, before[name])}
    assert moved == ({"transformer", "transformer_2"} if kind == "t2v-2.2" else {"transformer"})
    parts = tmp_path / "parts"
    Trainer(settings(place, parts, kind, clips, **options | {"steps": 5})).run()
    # Nothing that is drawn from it bears on a run.
    torch.rand(1)
    resumed = Trainer(settings(place, parts, kind, clips, **options))
    assert resumed.step == 5
    resumed.run()
    assert tiny.logged(parts) == found
    assert equal(weights(resumed), weights(whole)) and equal(average(resumed), average(whole))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_an_update_is_adamws_with_the_clipped_gradient_of_the_mean_loss(place, tmp_path, micro_batch):
    options = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.3}
    given = {**options, "learning_rate": 1e-2, "warmup": 2, "clip": 0.05}
    trainer = Trainer(settings(place, tmp_path, batch_size=4, micro_batch=micro_batch, optimizer=given))
    wanted = {name: tensor.requires_grad_() for name, tensor in weights(trainer).items()}
    optimizer = torch.optim.AdamW(wanted.values(), betas=(0.8, 0.95), eps=1e-4, weight_decay=0.3)
    clips = trainer.loader.batches()
    for step in range(2):
        batches = list(islice(clips, 4 // micro_batch))
        drawn = [(trainer.objective.draw(b.latents, step=step, micro=m), b) for m, b in enumerate(batches)]
        loss = torch.cat([trainer._losses(*draw) for draw in drawn]).mean()
        gradients = torch.autograd.grad(loss, list(trainer.trained.values()))
        norm = torch.nn.utils.get_total_norm(gradients)
        assert norm > 0.05
        for parameter, gradient in zip(wanted.values(), gradients, strict=True):
            parameter.grad = gradient * (0.05 / norm)
        optimizer.param_groups[0]["lr"] = 1e-2 * (step + 1) / 2
        optimizer.step()
        values = trainer._update(iter(batches))
        trainer.step += 1
        assert values["loss"] == pytest.approx(loss.item()) and values["gradient_norm"] == pytest.approx(norm.item())
        for name, tensor in trainer.trained.items():
            torch.testing.assert_close(tensor, wanted[name])


def test_the_average_follows_faster_at_the_start(place, tmp_path):
    trainer = Trainer(settings(place, tmp_path, ema=0.2))
    clips = trainer.loader.batches()
    for step, decay in enumerate((0.0, 2 / 11, 0.2)):
        before = {name: tensor.clone() for name, tensor in average(trainer).items()}
        trainer._update(clips)
        trainer.step = step + 1
        for name, tensor in average(trainer).items():
            wanted = decay * before[name] + (1 - decay) * trainer.trained[name]
            torch.testing.assert_close(tensor, wanted.detach(), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("attention", ["vmonarch", "based:adapter=null,feature_dim=4"])
def test_the_teacher_of_lora_layers_is_the_model_before_them(place, tmp_path, attention):
    """In the same weights: with full attention and without what is learnt; afterwards all is as it was."""
    options = {
        "attention": attention,
        "lora": {"rank": 4, "alpha": 6.0},
        "steps": 3,
        "optimizer": {"learning_rate": 0.1},
    }
    trainer = Trainer(settings(place, tmp_path / "one", objective={"distillation": 0.5}, **options))
    part = trainer.experts.parts["transformer"]
    processors = part.attn_processors
    trainer.run()
    stock = diffusers.WanTransformer3DModel.from_pretrained(place / "t2v" / "transformer")
    batch = next(trainer.loader.batches())
    draw = trainer.objective.draw(batch.latents, step=0)
    arguments, _ = trainer.objective.inputs(draw, batch.latents, batch.text, {})
    with torch.no_grad():
        before = trainer.experts("transformer", **arguments, return_dict=False)[0]
        taught = trainer.teacher("transformer", **arguments, return_dict=False)[0]
        after = trainer.experts("transformer", **arguments, return_dict=False)[0]
        wanted = stock(**arguments, return_dict=False)[0]
    torch.testing.assert_close(taught, wanted)
    assert torch.equal(before, after) and (after - wanted).abs().max() > 0.01
    assert {layer.scaling["default"] for layer in part.modules() if isinstance(layer, LoraLayer)} == {1.5}
    assert len(list(trainer.experts.parameters())) == len(list(stock.parameters())) + len(trainer.trained)
    assert all(parameter.requires_grad for parameter in trainer.trained.values())
    assert part.attn_processors == processors


@pytest.mark.gpu
def test_compiled_blocks_have_the_gradients_of_eager_ones():
    """Of a block of Wan2.1-1.3B, whose sums over 11,648 tokens torch 2.11 gets wrong without `compile_options`."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = diffusers.WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=1)
        clip, text, noise = torch.randn(1, 16, 8, 56, 104), torch.randn(1, 512, 4096), torch.tensor([500.0])
    found = []
    for compile in (False, True):
        if compile:
            compile_blocks(model)
        with torch.autocast("cuda", torch.bfloat16):
            out = model(clip, noise, text, return_dict=False)[0]
        out.float().square().mean().backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
        model.zero_grad()
    eager, compiled = found
    # The same for all keys leaves attention as it is: what gradient a bias of keys has is the noise of rounding.
    for name in [name for name in eager if not name.endswith("to_k.bias")]:
        assert (compiled[name] - eager[name]).norm() < 0.05 * eager[name].norm(), name


def test_blocks_are_compiled_without_what_sums_wrongly(place, tmp_path, monkeypatch):
    asked = []
    compiling = lambda model, dynamic, options: asked.append(options)
    monkeypatch.setattr(diffusers.WanTransformer3DModel, "compile_repeated_blocks", compiling)
    Trainer(settings(place, tmp_path, compile=True))
    # With it torch 2.11 gets gradients of Wan's blocks wrong on a GPU; others may not have it.
    wrong = {"triton.mix_order_reduction"}.intersection(torch._inductor.list_options())
    assert asked == [dict.fromkeys(wrong, False)]


def test_a_loss_that_is_not_finite_ends_the_run_before_the_update(place, tmp_path):
    trainer = Trainer(settings(place, tmp_path, clips="huge", steps=20))
    update, before = trainer._update, {}
    trainer._update = lambda batches: before.update(weights(trainer)) or update(batches)
    with pytest.raises(TrainingError, match=r"step \d+: .* not finite .* no weight was changed.*rank 0: clip-3"):
        trainer.run()
    assert equal(weights(trainer), before)


def validating(place, clips, levels, **data):
    return {
        "data": {"validation": str(place / "held-out"), **data},
        "validation": {"every": 2, "clips": clips, "levels": levels},
    }


def test_validation_is_always_the_same(place, tmp_path):
    trainer = Trainer(settings(place, tmp_path, steps=4, **validating(place, 3, 2)))
    first = trainer.validate()
    torch.manual_seed(5)
    trainer.step = 3
    assert trainer.validate() == first
    trainer.step = 0
    # Processes share the clips; what the second has beyond the last one does not count.
    shares = []
    for trainer.data_rank in (0, 1):
        trainer.data_world = 2
        shares.append(trainer.validate())
    assert (2 * shares[0] + shares[1]) / 3 == pytest.approx(first, rel=1e-5)
    trainer.data_rank, trainer.data_world = 0, 1
    trainer.run()
    found = tiny.logged(tmp_path, "validation_loss")
    assert list(found) == [0, 2, 4] and found[4] != first and trainer.validate() == found[4]
    # Neither the batches of training nor what is dropped from them bears on it.
    others = validating(place, 3, 2, caption_dropout=1.0) | {"objective": {"distillation": 1.0}, "batch_size": 4}
    assert Trainer(settings(place, tmp_path / "again", **others)).validate() == first


def test_validation_is_of_the_average_and_asks_each_transformer_for_its_levels(place, tmp_path):
    trainer = Trainer(settings(place, tmp_path / "both", "t2v-2.2", ema=0.9, **validating(place, 2, 12)))
    asked = {name: [] for name in trainer.experts.parts}
    for name, part in trainer.experts.parts.items():
        part.register_forward_pre_hook(
            lambda module, _, given, name=name: asked[name].append(given["timestep"].item()), with_kwargs=True
        )
    for tensor in trainer.average.shadow_params:
        tensor.mul_(1.1)
    kept = weights(trainer)
    found = trainer.validate()
    high, low = asked["transformer"], asked["transformer_2"]
    assert len(high) + len(low) == 24 and min(high) >= 1000 * trainer.objective.experts[0].low >= max(low)
    assert equal(weights(trainer), kept)
    trainer.average.shadow_params = list(kept.values())
    assert trainer.validate() != found
    for name in ("transformer", "transformer_2"):
        one = Trainer(settings(place, tmp_path / name, "t2v-2.2", train=name, **validating(place, 1, 1)))
        assert math.isfinite(one.validate()), name


def test_another_run_is_not_resumed(place, tmp_path):
    Trainer(settings(place, tmp_path, steps=2)).run()
    for changes, message in (
        ({"optimizer": {"learning_rate": 2e-3}}, "other settings: optimizer.learning_rate was 0.001, is 0.002; give"),
        # The learning rate follows the number of steps.
        ({"optimizer": {"schedule": "cosine"}, "steps": 9}, "schedule was .*; steps was 2, is 9; give"),
        ({"attention": "vmonarch-t3"}, "attention.num_iterations"),
        ({"model": str(model(place, "t2v-5b"))}, "was trained from another model"),
        ({"data": {"path": str(place / "held-out")}}, "was trained from other clips"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Trainer(settings(place, tmp_path, **changes))
    # What may change.
    free = {"log_every": 5, "checkpoints": {"keep": 3}, "validation": {"clips": 2}, "steps": 9}
    assert Trainer(settings(place, tmp_path, **free)).step == 2


def test_a_checkpoint_that_has_been_damaged_is_named_and_the_one_before_serves(place, tmp_path):
    options = {"steps": 2, "checkpoints": {"every": 1}}
    Trainer(settings(place, tmp_path, **options)).run()
    path = newest(tmp_path / "checkpoints")
    file = min(path.glob("*.safetensors"))
    cut = lambda: file.write_bytes(file.read_bytes()[:-9])
    for damage, why in ((cut, "header"), (file.unlink, "Missing key")):
        damage()
        for use in (
            lambda: Trainer(settings(place, tmp_path, **options)),
            lambda: export(tmp_path, tmp_path / "exported"),
        ):
            message = f"step-00000002 cannot be loaded; without it, the one before serves: .*{why}"
            with pytest.raises(CheckpointError, match=message):
                use()
    shutil.rmtree(path)
    assert Trainer(settings(place, tmp_path, **options)).step == 1


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_ended(place, tmp_path):
    first = Trainer(settings(place, tmp_path, steps=2))
    with pytest.raises(InputError, match="output_dir '.*' is in use by another run"):
        Trainer(settings(place, tmp_path, steps=2))
    first.run()
    # What cannot be resumed holds nothing.
    with pytest.raises(CheckpointError, match="other settings"):
        Trainer(settings(place, tmp_path, steps=2, seed=1))
    assert Trainer(settings(place, tmp_path, steps=2)).step == 2


def test_a_run_is_found_from_any_folder(place, tmp_path, monkeypatch):
    """Its model, data and plan were given from where it began, or from the home folder."""
    (tmp_path / "elsewhere").mkdir()
    heads = {"transformer": [["t1", "full"]] * 2}
    AttentionPlan({"t1": {"num_iterations": 1}, "full": None}, heads).save(tmp_path / "plan.json")
    for path in (model(place, "t2v"), place / "held-out"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(place)
    data = {"path": "clips", "validation": "~/held-out"}
    given = {"model": "~/t2v", "data": data, "attention": "vmonarch:plan=~/plan.json", "steps": 1}
    Trainer(settings(place, "~/run", **given)).run()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert export("~/run", "~/model") == tmp_path / "model" and (tmp_path / "model").is_dir()
    record = read(newest(tmp_path / "run" / "checkpoints"))["config"]
    assert [record["model"], *map(record["data"].get, data), record["attention"]["plan"]] == [
        *(str(place / name) for name in ("t2v", "clips", "held-out")), str(tmp_path / "plan.json")
    ]  # fmt: skip
    # A plan may have moved, as model and data may.
    (tmp_path / "plan.json").rename("p.json")
    assert Trainer(settings(place, tmp_path / "run", attention="vmonarch:plan=p.json", steps=2)).step == 1


def test_another_number_of_processes_goes_on_if_it_may(place, tmp_path):
    Trainer(settings(place, tmp_path, steps=2)).run()
    path = newest(tmp_path / "checkpoints") / "run.json"
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 3'))
    with pytest.raises(CheckpointError, match="was saved by 3 processes, there are 1; .*any_processes=true lets"):
        Trainer(settings(place, tmp_path))
    assert Trainer(settings(place, tmp_path, checkpoints={"any_processes": True})).step == 2


@pytest.mark.parametrize("kind", ["t2v", "t2v-2.2"])
def test_full_weights_become_a_folder_that_stock_diffusers_loads(place, tmp_path, kind):
    trainer = Trainer(settings(place, tmp_path / "run", kind, ema=0.5, steps=12, checkpoints={"every": 6}))
    trainer.run()
    assert steps_in(tmp_path / "run" / "checkpoints") == [6, 12]
    pipe = diffusers.WanPipeline.from_pretrained(export(tmp_path / "run", tmp_path / "model"))
    for name in trainer.experts.parts:
        found = dict(getattr(pipe, name).named_parameters())
        prefix = f"parts.{name}."
        assert equal(
            found, {key.removeprefix(prefix): v for key, v in average(trainer).items() if key.startswith(prefix)}
        )
    pipe.set_progress_bar_config(disable=True)
    assert tiny.generate(pipe).isfinite().all()
    with pytest.raises(InputError, match="output must not exist"):
        export(tmp_path / "run", tmp_path / "model")
    options = {"step": 6, "dtype": torch.bfloat16}
    stored = load_file(
        export(tmp_path / "run", tmp_path / "sixth", **options) / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    sixth = {f"average.{name}": torch.zeros_like(tensor) for name, tensor in average(trainer).items()}
    read_tensors(tmp_path / "run" / "checkpoints" / "step-00000006", sixth)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16, torch.float32}
    for name, tensor in stored.items():
        assert torch.equal(tensor, sixth[f"average.parts.transformer.{name}"].to(tensor.dtype))
    with pytest.raises(InputError, match="model must be of the Wan family.*LTXPipeline"):
        export(tmp_path / "run", tmp_path / "other", model=str(model(place, "ltx")))


@pytest.mark.parametrize("kind,train", [("t2v", "all"), ("t2v-2.2", "all"), ("t2v-2.2", "transformer_2")])
def test_lora_layers_become_files_that_stock_diffusers_loads(place, tmp_path, kind, train):
    """Under diffusers' names and under ComfyUI's; alpha is in the second factor."""
    targets = ["to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2", "time_proj"]
    lora = {"rank": 2, "alpha": 6.0, "targets": targets}
    options = {"lora": lora, "optimizer": {"learning_rate": 0.05}, "steps": 4, "train": train}
    trainer = Trainer(settings(place, tmp_path / "run", kind, **options))
    assert all(".lora_" in name for name in trainer.trained)
    trainer.run()
    names = trainer.experts.parts
    suffix, other = (".safetensors", "folder") if len(names) == 1 else ("", "a.safetensors")
    for whose in ("diffusers", "comfyui"):
        output = export(tmp_path / "run", tmp_path / f"{whose}{suffix}", names=whose)
        pipe = diffusers.WanPipeline.from_pretrained(place / kind)
        for name in names:
            file = output if suffix else output / f"{name}.safetensors"
            assert {key.split(".")[-2] for key in load_file(file)} == {"lora_A", "lora_B"}
            pipe.load_lora_weights(file, load_into_transformer_2=name == "transformer_2")
        vmonarch.apply(pipe, vmonarch.VMonarchProcessor())
        for name in names:
            ours = tiny.run(trainer.experts.parts[name].eval())
            torch.testing.assert_close(tiny.run(getattr(pipe, name)), ours, atol=1e-5, rtol=1e-5)
    found = {key.rpartition(".lora_")[0].removeprefix("diffusion_model.") for key in load_file(file)}
    attention = {f"blocks.{n}.{whose}.{x}" for n in (0, 1) for whose in ("self_attn", "cross_attn") for x in "qkvo"}
    assert found == {*attention, *(f"blocks.{n}.ffn.{x}" for n in (0, 1) for x in (0, 2)), "time_projection.1"}
    with pytest.raises(InputError, match="names cannot be comfyui: patch_embedding has no name there"):
        comfyui_name("patch_embedding.lora_A.weight")
    assert {path.name for path in tmp_path.iterdir()} == {"run", f"diffusers{suffix}", f"comfyui{suffix}"}
    with pytest.raises(InputError, match=f"output must {'end with .safetensors' if suffix else 'be a folder'}"):
        export(tmp_path / "run", tmp_path / other)


def test_validation_videos(tmp_path, monkeypatch):
    """One step of the embedded model, which can be watched while it trains, and goes on if it is killed after one."""
    shape, whole = (16, 2, 4, 4), config.complete
    small = {"height": 32, "width": 32, "num_frames": 5, "steps": 1}
    monkeypatch.setattr(config, "complete", lambda *given: dataclasses.replace(whole(*given), **small))
    generator = torch.Generator().manual_seed(0)
    rows = (Sample(f"{n}", torch.randn(shape, generator=generator), torch.randn(4, 128)) for n in range(2))
    write_shard(tmp_path / "clips" / "a.parquet", rows)
    validation = {"every": 0, "videos_every": 1, "prompts": ["a red circle moving right"]}
    values = {"model": "embedded", "steps": 1, "batch_size": 1, "trackers": ["tensorboard"], "validation": validation}
    given = settings(tmp_path, tmp_path / "run", **values)

    def killed(trainer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "save", killed)
        Trainer(given).run()
    Trainer(given).run()
    names = sorted(path.name for path in (tmp_path / "run" / "videos").iterdir())
    assert names == ["step-00000001-00.mp4"]
    assert list((tmp_path / "run").rglob("events.out.tfevents*"))
    exported = export(tmp_path / "run", tmp_path / "model")
    # A finetune of the embedded model is run with its settings.
    found = recommended_settings(find_model(str(exported)))
    assert found == recommended_settings(find_model("embedded")) and found["height"] == 96
    stored = load_file(exported / "transformer" / "diffusion_pytorch_model.safetensors")
    assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.float16
    assert stored["blocks.0.scale_shift_table"].dtype == torch.float32
