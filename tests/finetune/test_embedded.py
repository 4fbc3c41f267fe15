"""Data, VAE, text and training of the embedded model; the shipped weights."""

import json
import shutil

import diffusers
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_file
from transformers import AutoTokenizer

import vmonarch
from vmonarch.finetune import scenes as data
from vmonarch.finetune.embedded import __main__ as command
from vmonarch.finetune.embedded import text, transformer, vae
from vmonarch.finetune.embedded.optimizer import StackedMuon, orthogonalize
from vmonarch.pipelines import embedded
from vmonarch.pipelines.embedded import EMBEDDED_SETTINGS, embedded_model_path


@pytest.fixture(scope="module")
def shipped_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan.from_pretrained(embedded_model_path() / "vae").eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(embedded_model_path() / "tokenizer")


def plain_vae(**overrides) -> AutoencoderKLWan:
    torch.manual_seed(0)
    config = {**vae.VAE_CONFIG, "base_dim": 8, "decoder_base_dim": 8, **overrides}
    model = AutoencoderKLWan(**config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


WAN21 = {
    "dim_mult": [1, 2, 2, 2],
    "temperal_downsample": [False, True, True],
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": None,
}


@pytest.mark.parametrize("frames", [1, 5, 17])
@pytest.mark.parametrize("overrides", [{}, WAN21], ids=["patched", "wan2.1"])
@torch.no_grad()
def test_parallel_vae_equals_the_stock_one(overrides, frames):
    model = plain_vae(**overrides)
    video = torch.randn(2, 3, frames, 32, 48)
    moments = model.encode(video).latent_dist.parameters
    torch.testing.assert_close(vae.encode_parallel(model, video), moments, atol=1e-5, rtol=1e-4)
    latents = torch.randn(2, 16, (frames + 3) // 4, 4, 6)
    expected = model.decode(latents).sample
    assert expected.abs().mean() > 1e-3
    torch.testing.assert_close(vae.decode_parallel(model, latents).clamp(-1, 1), expected, atol=1e-5, rtol=1e-4)


def test_parallel_vae_refuses_what_it_does_not_compute():
    with pytest.raises(ValueError, match="1 \\+ 4n"):
        vae.encode_parallel(plain_vae(), torch.zeros(1, 3, 4, 16, 16))
    residual = plain_vae(is_residual=True)
    with pytest.raises(ValueError, match="residual"):
        vae.encode_parallel(residual, torch.zeros(1, 3, 5, 16, 16))
    with pytest.raises(ValueError, match="residual"):
        vae.decode_parallel(residual, torch.zeros(1, 16, 2, 2, 2))


def test_shipped_vae_reconstructs_and_its_statistics_fit(shipped_vae):
    video = data.render(data.sample_scenes(1, 4242), frames=range(33))
    assert vae.reconstruction_psnr(shipped_vae, video).mean() >= 32
    mean, std = vae.latent_statistics(shipped_vae, "cpu")
    latents = (vae.encode_means(shipped_vae, data.render(data.sample_scenes(6, 4343), frames=range(17))) - mean) / std
    assert latents.mean().abs() < 0.2 and 0.7 < latents.std() < 1.3


def test_errors_on_objects_and_in_the_first_frame_count_more():
    video = torch.zeros(1, 3, 4, 2, 5)
    video[:, 0, :, 0, 0] = 1.0  # one saturated pixel of ten in each of four frames
    plain = vae.weighted_errors(video + 0.5, video, 0.0, 0.0)
    assert [error.item() for error in plain] == pytest.approx([0.5, 0.25])
    objects = vae.weighted_errors(video + 0.5, video, 4.0, 0.0)
    assert [error.item() for error in objects] == pytest.approx([0.5 * 1.4, 0.25 * 1.4])
    first = vae.weighted_errors(video + 0.5, video, 0.0, 8.0)
    assert [error.item() for error in first] == pytest.approx([0.5 * 3, 0.25 * 3])
    both = vae.weighted_errors(video + 0.5, video, 4.0, 8.0)
    assert both[0].item() == pytest.approx(0.5 * 3.4)


def test_vae_training_sets_the_statistics_of_its_latents():
    config = {**vae.VAE_CONFIG, "base_dim": 8, "decoder_base_dim": 8}
    model, log = vae.train_vae(
        steps=2, batch=1, seed=0, device="cpu", config=config, statistics_clips=1,
        object_weight=3.0, first_frame_weight=2.0,
    )  # fmt: skip
    assert [entry["step"] for entry in log] == [2]
    assert model.config.latents_std != config["latents_std"] and min(model.config.latents_std) > 0
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tokenizer_is_total_and_ends_every_text(tokenizer):
    for prompt in ("", "a red circle", "Ünïcödé 🟥 zyxw!", "word " * 1000):
        ids = tokenizer(prompt, truncation=True, max_length=512).input_ids
        assert ids[-1] == 1 and 0 not in ids and len(ids) <= 512
    assert tokenizer("A Red CIRCLE").input_ids == tokenizer("a red circle").input_ids
    assert tokenizer.decode(tokenizer("a qzxv circle").input_ids, skip_special_tokens=True).strip() == "a qzxv circle"


def test_fast_tokenization_equals_the_tokenizers_own(tokenizer):
    captions = ["a red circle moves left", "", "a large star " * 40]
    expected = tokenizer(captions, padding="max_length", max_length=55, truncation=True, return_tensors="pt").input_ids
    assert torch.equal(text.tokenize(tokenizer, captions).long(), expected)


@torch.no_grad()
def test_training_encodes_text_as_the_pipeline_does(tokenizer):
    encoder = text.build_text_encoder(len(tokenizer)).eval()
    pipe = diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=encoder,
        vae=plain_vae(),
        scheduler=diffusers.UniPCMultistepScheduler(),
        transformer=None,
    )
    prompts = ["a red circle moves left", "A small blue star rises over a striped grey background."]
    expected, negative = pipe.encode_prompt(prompts, max_sequence_length=512, device="cpu")
    embeddings, pooled = text.encode_text(encoder, text.tokenize(tokenizer, prompts))
    torch.testing.assert_close(embeddings, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(text.encode_text(encoder, text.tokenize(tokenizer, ["", ""]))[0], negative)
    assert expected.shape == (2, 512, text.TEXT_DIM) and pooled.shape == (2, text.TEXT_DIM)


TINY_SIZES = {"num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 64, "num_layers": 2}
TINY = {**transformer.TRANSFORMER_CONFIG, **TINY_SIZES}


@torch.no_grad()
def test_training_attention_equals_the_stock_processor_on_padded_text():
    torch.manual_seed(0)
    model = WanTransformer3DModel(**TINY).eval()
    latents, timestep, prompt = torch.randn(2, 16, 3, 4, 6), torch.tensor([10.0, 900.0]), torch.randn(2, 9, 128)
    pad = lambda rows: torch.nn.functional.pad(prompt, (0, 0, 0, rows))
    expected = model(latents, timestep, pad(512 - 9), return_dict=False)[0]
    model.set_attn_processor(transformer.TrainingAttention(512 - 9))
    torch.testing.assert_close(model(latents, timestep, pad(1), return_dict=False)[0], expected, atol=1e-5, rtol=1e-4)
    # Without the logarithm the padding would weigh too little: the comparison can fail.
    model.set_attn_processor(transformer.TrainingAttention(1))
    assert (model(latents, timestep, pad(1), return_dict=False)[0] - expected).abs().max() > 1e-3


def test_flow_matching_target_is_what_the_shipped_scheduler_integrates():
    scheduler = diffusers.UniPCMultistepScheduler.from_pretrained(embedded_model_path() / "scheduler")
    scheduler.set_timesteps(20)
    clean, noise = torch.randn(2, 16, 2, 4, 4), torch.randn(2, 16, 2, 4, 4)
    seen = []

    def oracle(hidden_states, timestep, encoder_hidden_states, return_dict):
        seen.append((hidden_states, timestep))
        return (noise - clean,)

    sigma = torch.tensor([0.25, 0.75])
    loss = transformer.flow_matching_loss(oracle, clean, noise, sigma, torch.zeros(2, 512, 8))
    assert loss.abs().max() < 1e-12 and seen[0][1].tolist() == [250, 750]
    x = noise
    for t in scheduler.timesteps:
        x = scheduler.step(noise - clean, t, x, return_dict=False)[0]
    torch.testing.assert_close(x, clean, atol=1e-3, rtol=1e-3)


def test_noise_levels_cover_the_range_and_lean_towards_noise():
    torch.manual_seed(0)
    sigmas = transformer.sample_sigmas(20_000, 3.0, "cpu")
    assert sigmas.min() > 0 and sigmas.max() <= 1 and (sigmas < 0.1).any() and (sigmas > 0.98).any()
    assert 0.65 < sigmas.median() < 0.85


@pytest.mark.parametrize("shape", [(5, 12, 30), (4, 20, 8), (3, 8, 20)], ids=str)
def test_muon_orthogonalises(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
    assert values.min() > 0.4 and values.max() < 1.3


def test_muon_learns_and_refuses_vectors():
    torch.manual_seed(0)
    target, inputs = torch.randn(6, 4), torch.randn(64, 4)
    weights = [torch.nn.Parameter(torch.zeros(6, 4)), torch.nn.Parameter(torch.zeros(6, 4))]
    optimizer = StackedMuon(weights, lr=0.1)
    losses = []
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        loss = sum(((inputs @ (weight - target).T) ** 2).mean() for weight in weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]
    torch.testing.assert_close(weights[0], weights[1])
    with pytest.raises(ValueError, match="parameters"):
        StackedMuon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


def test_training_continues_from_given_weights(tokenizer):
    torch.manual_seed(1)
    given = WanTransformer3DModel(**TINY)
    before = given.blocks[0].ffn.net[2].weight.detach().clone()
    after, *_ = tiny_run(tokenizer, transformer=given, steps=1, learning_rate=1e-6)
    torch.testing.assert_close(after.blocks[0].ffn.net[2].weight, before, atol=1e-4, rtol=1e-3)


def tiny_run(tokenizer, **overrides):
    torch.manual_seed(0)
    scenes = data.sample_scenes(4, 0)
    tokens = text.tokenize(tokenizer, data.write_captions(scenes, 0, 2), length=32).view(4, 2, 32)
    arguments = {
        "latents": torch.randn(4, 16, 2, 4, 4).half(),
        "tokens": tokens,
        "targets": text.attribute_targets(scenes),
        "text_encoder": text.build_text_encoder(len(tokenizer), num_layers=1),
        "steps": 4,
        "batch": 2,
        "seed": 0,
        "device": "cpu",
        "config": TINY,
    }
    return transformer.train_transformer(**{**arguments, **overrides})


def test_training_resumes_exactly(tokenizer, tmp_path):
    whole, whole_text, _ = tiny_run(tokenizer)
    file = tmp_path / "checkpoint.pt"

    def stop(step, *_):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(tokenizer, checkpoint=file, checkpoint_every=2, on_checkpoint=stop)
    resumed, resumed_text, log = tiny_run(tokenizer, checkpoint=file)
    for a, b in ((whole, resumed), (whole_text, resumed_text)):
        for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5, msg=name)
    assert log[-1]["step"] == 4
    start = WanTransformer3DModel(**TINY)
    assert (whole.proj_out.weight - start.proj_out.weight).abs().max() > 0


def test_training_ends_within_its_time_limit(tokenizer):
    *_, log = tiny_run(tokenizer, steps=100_000, time_limit=1e-9)
    assert log[-1]["step"] == 1


def test_shipped_model_is_stock_small_and_safe():
    folder = embedded_model_path()
    index = json.loads((folder / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    classes = {name: tuple(value) for name, value in index.items() if isinstance(value, list)}
    assert classes["transformer"] == ("diffusers", "WanTransformer3DModel")
    assert classes["vae"] == ("diffusers", "AutoencoderKLWan")
    assert classes["text_encoder"] == ("transformers", "UMT5EncoderModel")
    assert command.folder_bytes(folder) <= 16 * 2**20
    endings = {file.suffix for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert endings <= {".json", ".safetensors", ".py"}


def test_the_shipped_adapter_fits_the_shipped_model_and_is_small():
    file = embedded.embedded_adapter_path()
    assert file.stat().st_size <= 2 * 2**20
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float16}
    vmonarch.load_adapter(diffusers.WanPipeline.from_pretrained(embedded_model_path()), file)


@torch.no_grad()
def test_stock_pipeline_generates_with_the_shipped_model():
    pipe = diffusers.WanPipeline.from_pretrained(embedded_model_path())
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}
    assert pipe.scheduler.config.flow_shift == EMBEDDED_SETTINGS.flow_shift
    pipe.set_progress_bar_config(disable=True)
    make = lambda prompt: pipe(
        prompt,
        height=EMBEDDED_SETTINGS.height,
        width=EMBEDDED_SETTINGS.width,
        num_frames=5,
        num_inference_steps=4,
        guidance_scale=EMBEDDED_SETTINGS.guidance_scale,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames[0]
    red, blue = make("a large red circle moves left"), make("a large blue star rises")
    assert red.shape == (5, 3, 96, 160) and torch.isfinite(red).all() and red.std() > 0.01
    assert (red - blue).abs().mean() > 0.005


def test_a_missing_model_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(FileNotFoundError, match="finetune.embedded"):
        embedded_model_path()


def test_saving_writes_a_stock_folder_in_half_precision(tokenizer, tmp_path):
    command.save_pipeline(
        tmp_path / "model",
        vae=plain_vae(),
        tokenizer=tokenizer,
        text_encoder=text.build_text_encoder(len(tokenizer), num_layers=1),
        transformer=WanTransformer3DModel(**TINY),
        flow_shift=3.0,
    )
    pipe = diffusers.WanPipeline.from_pretrained(tmp_path / "model")
    assert type(pipe) is diffusers.WanPipeline
    assert {pipe.transformer.dtype, pipe.vae.dtype, pipe.text_encoder.dtype} == {torch.float32}
    size = command.folder_bytes(tmp_path / "model")
    parameters = sum(p.numel() for m in (pipe.vae, pipe.text_encoder, pipe.transformer) for p in m.parameters())
    assert 2 * parameters < size < 2 * parameters + 200_000
    shutil.rmtree(tmp_path / "model")


@pytest.mark.parametrize("argument", ["--steps", "--clips", "--batch", "--vae-steps"])
def test_the_training_command_refuses_counts_below_one(argument, tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--output", str(tmp_path / "o"), "--work-dir", str(tmp_path / "w"), argument, "0"])
    assert argument in capsys.readouterr().err and not (tmp_path / "w").exists()


def test_the_training_command_refuses_a_folder_without_a_model(tmp_path, capsys):
    arguments = ["--output", str(tmp_path / "o"), "--work-dir", str(tmp_path / "w"), "--continue-from", str(tmp_path)]
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert "--continue-from must be the folder of a pipeline" in capsys.readouterr().err
