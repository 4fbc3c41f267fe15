"""How the embedded model is trained, and the weights that ship."""

import dataclasses
import json

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file
from transformers import UMT5Config, UMT5EncoderModel

import vmonarch
from vmonarch.finetune.embedded import __main__ as command
from vmonarch.finetune.embedded import vae
from vmonarch.finetune.embedded.text_to_video import TextToVideo, attribute_targets
from vmonarch.finetune.scenes import render, sample_scenes
from vmonarch.pipelines import embedded
from vmonarch.pipelines.config import recommended_settings
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path
from vmonarch.pipelines.model_folder import find_model, folder_bytes


@pytest.fixture(scope="module")
def shipped() -> diffusers.WanPipeline:
    return diffusers.WanPipeline.from_pretrained(embedded_model_path())


def tiny_vae() -> AutoencoderKLWan:
    torch.manual_seed(0)
    small = {"base_dim": 8, "decoder_base_dim": 8}
    model = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(embedded_model_path() / "vae") | small).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_model(batch: int = 2) -> TextToVideo:
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 32, "num_layers": 1}
    config = WanTransformer3DModel.load_config(embedded_model_path() / "transformer") | sizes
    text_encoder = UMT5EncoderModel(UMT5Config.from_pretrained(embedded_model_path() / "text_encoder", num_layers=1))
    return TextToVideo(text_encoder, WanTransformer3DModel.from_config(config), 3.0, batch)


@pytest.mark.parametrize("frames", [1, 17])
@torch.no_grad()
def test_the_vae_over_all_frames_equals_the_stock_one(frames):
    model, video = tiny_vae(), torch.randn(2, 3, frames, 32, 48)
    close = {"atol": 1e-5, "rtol": 1e-4}
    moments = model.encode(video).latent_dist.parameters
    torch.testing.assert_close(vae.encode_parallel(model, video), moments, **close)
    torch.testing.assert_close(vae.encode_means(model, video), moments[:, :16], **close)
    latents = torch.randn(2, 16, (frames + 3) // 4, 4, 6)
    expected = model.decode(latents).sample
    assert expected.abs().mean() > 1e-3
    torch.testing.assert_close(vae.decode_parallel(model, latents).clamp(-1, 1), expected, **close)


def test_the_vae_learns_and_gets_the_statistics_of_its_latents(monkeypatch):
    small = lambda scenes, device, scale=1: render(scenes, device, range(5))[..., :32, :32]
    monkeypatch.setattr(command, "render", small)
    model, scenes = tiny_vae(), sample_scenes(70, 5)
    video = small(scenes, "cpu")
    before = vae.Reconstruction(model)(video)
    settings = command.Settings(vae_steps=30, vae_batch=2, statistics_clips=70)
    command.train_vae(model, settings, torch.device("cpu"))
    after = vae.Reconstruction(model)(video)
    assert after["loss"] < 0.9 * before["loss"] and after["l1"] < before["l1"]
    latents = command.encode_clips(model, scenes, torch.device("cpu"))
    assert latents.shape == (70, 16, 2, 4, 4) and latents.mean().abs() < 0.2 and 0.8 < latents.float().std() < 1.2
    mean, std = (torch.tensor(model.config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    stock = (model.encode(video).latent_dist.mode() - mean) / std
    torch.testing.assert_close(latents.float(), stock, atol=1e-2, rtol=1e-2)


@torch.no_grad()
def test_text_is_encoded_as_the_pipeline_does(shipped):
    model = TextToVideo(shipped.text_encoder, torch.nn.Identity(), 3.0, 2)
    prompts = ["a red circle moves left", "A small blue star rises over a striped grey background.", ""]
    ids = shipped.tokenizer(prompts, padding="max_length", max_length=55, return_tensors="pt").input_ids
    embeddings, pooled = model.encode(ids)
    expected, negative = shipped.encode_prompt(prompts[:2], negative_prompt=["", ""], max_sequence_length=512)
    torch.testing.assert_close(embeddings, torch.cat((expected, negative[:1])), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(pooled[2], negative[0, 0])


@torch.no_grad()
def test_the_loss_is_of_what_the_scheduler_integrates():
    """With the velocity from the clip to the noise the loss is 0, and the shipped scheduler arrives at the clip."""
    clean = torch.randn(1, 16, 2, 4, 4)
    model, texts, sigmas = tiny_model(batch=400), [], []

    def oracle(hidden_states, timestep, encoder_hidden_states, return_dict=False):
        texts.append(encoder_hidden_states)
        sigmas.append(timestep / 1000)
        return ((hidden_states - clean) / sigmas[-1].view(-1, 1, 1, 1, 1),)

    del model.transformer
    model.transformer = oracle
    tokens = torch.tensor([[[5, 6, 1, 0], [7, 1, 0, 0]]])
    found = model(clean, tokens, attribute_targets(sample_scenes(1, 0)))
    assert found["flow"] < 1e-6 and found["loss"] == pytest.approx(0.05 * found["text"].item(), rel=0.2)
    sigma = sigmas[0]
    assert sigma.min() > 0 and sigma.max() <= 1 and 0.65 < sigma.median() < 0.85
    # A tenth is uniform before the shift: of the logit-normal alone there would be a fiftieth above 0.985.
    assert 0.005 < (sigma > 0.985).float().mean() < 0.06
    captions = [model.encode(ids[None])[0][0] for ids in (*tokens[0], torch.tensor([1, 0, 0, 0]))]
    shares = [sum(torch.allclose(text, caption, atol=1e-5) for text in texts[0]) / 400 for caption in captions]
    assert shares == pytest.approx([0.45, 0.45, 0.1], abs=0.08) and sum(shares) == pytest.approx(1)
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(embedded_model_path() / "scheduler")
    scheduler.set_timesteps(20)
    noise = x = torch.randn_like(clean)
    for t in scheduler.timesteps:
        x = scheduler.step(noise - clean, t, x, return_dict=False)[0]
    torch.testing.assert_close(x, clean, atol=1e-3, rtol=1e-3)


def fit(model, **options):
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(4, 16, 2, 4, 4, generator=generator).half()
    tokens = torch.randint(1, 99, (4, 2, 12), generator=generator)
    data = latents, tokens, attribute_targets(sample_scenes(4, 0))
    is_matrix = lambda name, parameter: ".blocks." in name and parameter.ndim == 2
    rate = options.pop("rate", lambda progress: 1e-2 * (1 - progress))
    defaults = {"steps": 4, "seed": 0, "decay": 0.99, "weight_decay": 0.02}
    return command.fit(model, lambda step: data, is_matrix, rate, torch.device("cpu"), **defaults | options)


def test_everything_learns_at_its_rate_and_a_loss_that_is_not_finite_ends_the_run():
    model, shares = tiny_model(), []
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    log = fit(model, rate=lambda progress: shares.append(progress) or 1e-2)
    assert log[-1]["step"] == 4 and shares == [0, 0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75]
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]) or "blocks.0.attn2.norm" in name, f"{name} learns"
    torch.nn.init.constant_(model.transformer.proj_out.bias, torch.nan)
    with pytest.raises(FloatingPointError, match="the loss is not finite at step 0"):
        fit(model, steps=1)


QUICK = {
    "clips": 2, "steps": 2, "batch": 2, "vae_steps": 2, "vae_batch": 1, "statistics_clips": 1, "scale": 1,
    "transformer": {"num_attention_heads": 1, "ffn_dim": 64, "num_layers": 1},
}  # fmt: skip


def run(folder, *words, train=command.run):
    """The command, with a few steps of everything."""
    short = lambda settings, *rest: train(dataclasses.replace(settings, **QUICK), *rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "run", short)
        return command.main(["--output", str(folder / "model"), *words])


@pytest.fixture(scope="module")
def proxy(tmp_path_factory):
    """A folder with a proxy that the command has made."""
    folder = tmp_path_factory.mktemp("proxy")
    run(folder, "--proxy", "--learning-rate", "7e-4")
    return folder


def test_the_command_writes_a_stock_pipeline_and_how_it_was_made(proxy):
    folder = proxy / "model"
    assert sorted(path.name for path in proxy.iterdir()) == ["model"]
    pipe = diffusers.WanPipeline.from_pretrained(folder)
    assert type(pipe) is diffusers.WanPipeline and pipe.scheduler.config.flow_shift == 5.0
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}
    size = sum(p.numel() for m in (pipe.vae, pipe.text_encoder, pipe.transformer) for p in m.parameters())
    assert 2 * size < folder_bytes(folder) < 2 * size + 200_000
    record = json.loads((folder / "proxy.json").read_text())
    assert record["command"].endswith("--proxy --learning-rate 7e-4") and record["log"][-1]["step"] == 2
    assert record["training"]["learning_rate"] == 7e-4
    assert record["parameters"] == sum(parameter.numel() for parameter in pipe.transformer.parameters())
    recommended = recommended_settings(find_model(str(folder)))
    assert recommended["flow_shift"] == 5.0 and (recommended["height"], recommended["width"]) == (96, 160)


@pytest.mark.slow
@pytest.mark.deep
def test_the_command_trains_from_scratch_and_goes_on_from_a_model(tmp_path):
    run(tmp_path)
    pipe = diffusers.WanPipeline.from_pretrained(tmp_path / "model")
    assert pipe.tokenizer("a red circle").input_ids[-1] == 1 and pipe.vae.config.latents_mean[0] != 0
    assert pipe.scheduler.config.flow_shift == 3.0
    run(tmp_path / "next", "--continue-from", str(tmp_path / "model"), "--learning-rate", "1e-9")
    file = "model/transformer/diffusion_pytorch_model.safetensors"
    learnt, again = load_file(tmp_path / file), load_file(tmp_path / "next" / file)
    assert again.keys() == learnt.keys() and all(torch.equal(again[name], learnt[name]) for name in again)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--learning-rate", "-1"], "--learning-rate must be positive, got -1"),
        (["--continue-from", "docs"], "--continue-from must be the folder of a pipeline, got docs"),
        (["--output", "docs"], "docs exists; nothing is overwritten"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_command_refuses_what_it_cannot_use(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, *words)
    assert message in capsys.readouterr().err and not (tmp_path / "model").exists()


def test_the_shipped_model_is_stock_small_and_safe(shipped):
    folder = embedded_model_path()
    index = json.loads((folder / "model_index.json").read_text())
    classes = {name: value[1] for name, value in index.items() if isinstance(value, list)}
    assert index["_class_name"] == "WanPipeline" and classes["transformer"] == "WanTransformer3DModel"
    assert (classes["vae"], classes["text_encoder"]) == ("AutoencoderKLWan", "UMT5EncoderModel")
    assert folder_bytes(folder) <= 16 * 2**20
    endings = {file.suffix for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert endings <= {".json", ".safetensors", ".py"}
    assert {shipped.transformer.dtype, shipped.vae.dtype, shipped.text_encoder.dtype} == {torch.float32}
    assert shipped.scheduler.config.flow_shift == EMBEDDED_SETTINGS.flow_shift


@torch.no_grad()
def test_the_shipped_vae_reconstructs_and_its_statistics_fit(shipped):
    video = render(sample_scenes(1, 4242), frames=range(33))
    output = shipped.vae.decode(shipped.vae.encode(video).latent_dist.mode()).sample
    assert -10 * torch.log10((output - video).square().mean() / 4) >= 32
    mean, std = (torch.tensor(shipped.vae.config[name]).view(-1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
    latents = (vae.encode_means(shipped.vae, render(sample_scenes(6, 4343), frames=range(17))) - mean) / std
    assert latents.mean().abs() < 0.2 and 0.7 < latents.std() < 1.3


def test_the_shipped_tokenizer_is_total_and_ends_every_text(shipped):
    for prompt in ("", "a red circle", "Ünïcödé 🟥 zyxw!", "word " * 1000):
        ids = shipped.tokenizer(prompt, truncation=True, max_length=512).input_ids
        assert ids[-1] == 1 and 0 not in ids and len(ids) <= 512
    assert shipped.tokenizer("A Red CIRCLE").input_ids == shipped.tokenizer("a red circle").input_ids
    ids = shipped.tokenizer("a qzxv circle").input_ids
    assert shipped.tokenizer.decode(ids, skip_special_tokens=True).strip() == "a qzxv circle"


@torch.no_grad()
def test_the_stock_pipeline_generates_with_the_shipped_model(shipped):
    shipped.set_progress_bar_config(disable=True)
    size = {"height": EMBEDDED_SETTINGS.height, "width": EMBEDDED_SETTINGS.width, "num_frames": 5}
    steps = {"num_inference_steps": 4, "guidance_scale": EMBEDDED_SETTINGS.guidance_scale, "output_type": "pt"}
    make = lambda prompt: shipped(prompt, **size, **steps, generator=torch.Generator().manual_seed(0)).frames[0]
    red, blue = make("a large red circle moves left"), make("a large blue star rises")
    assert red.shape == (5, 3, 96, 160) and torch.isfinite(red).all() and red.std() > 0.01
    assert (red - blue).abs().mean() > 0.005


def test_the_shipped_adapter_fits_the_shipped_model_and_is_small():
    file = embedded.embedded_adapter_path()
    assert file.stat().st_size <= 2 * 2**20
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}
    vmonarch.load_adapter(WanTransformer3DModel.from_pretrained(embedded_model_path() / "transformer"), file)


def test_a_missing_model_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="weights are missing from .*; reinstall vmonarch"):
        embedded_model_path()
