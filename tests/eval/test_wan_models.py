"""Models of `configs/models/`: they are what they are named after, and random weights stand as loaded ones would."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from vmonarch.configs import InputError, preset_names
from vmonarch.eval.wan_models import UMT5_XXL, read_model

CPU = torch.device("cpu")
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
    model.check_parts(argument="model")
    latents = model.latents((5, 64, 96), argument="size")
    with torch.device("meta"):
        found = WanTransformer3DModel(**model.transformer), AutoencoderKLWan(**model.vae)
        video = found[1].decode(torch.empty(1, model.transformer["out_channels"], *latents), return_dict=False)[0]
        assert parameters(UMT5EncoderModel(UMT5Config(**UMT5_XXL))) == 5_680_910_336
    assert tuple(map(parameters, found)) == PUBLISHED[name]
    assert video.shape == (1, 3, 5, 64, 96), "the VAE must compress as much as the latent grid says"
    assert model.transformers == (("transformer", "transformer_2") if "a14b" in name else ("transformer",))
    assert model.expand_timesteps == (name == "wan2.2-5b")


def test_random_weights_have_the_dtypes_of_loaded_ones(tiny_yaml, tmp_path):
    built = read_model(tiny_yaml).build("transformer", CPU, torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "model", torch_dtype=torch.bfloat16)
    dtypes = {name: tensor.dtype for name, tensor in loaded.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in built.state_dict().items()} == dtypes
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    assert not any(parameter.requires_grad for parameter in built.parameters())


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


BAD = {
    "unknown key": ("heads: 2", "heads"),
    "unknown key of the VAE": ("vae: {z_dims: 4}", "vae.z_dims (did you mean z_dim?)"),
    "unknown key of the text encoder": ("text_encoder: {width: 4}", "text_encoder.width"),
    "a VAE that is no mapping": ("vae: wan", "a mapping as vae, got 'wan'"),
    "boundary": ("boundary_ratio: 875", "boundary_ratio between 0 and 1, got 875"),
    "timesteps": ("expand_timesteps: 3", "true or false as expand_timesteps, got 3"),
    "image-to-video": ("image_dim: 1280", "supported: text-to-video models"),
    "channels": ("in_channels: 36", "has in_channels 36 but vae.z_dim 16"),
    "text": ("text_dim: 8", "has text_dim 8 but text_encoder.d_model 4096"),
}


@pytest.mark.parametrize("contents, message", BAD.values(), ids=BAD)
def test_bad_configs_are_refused_by_key(tmp_path, contents, message):
    (tmp_path / "bad.yaml").write_text(contents)
    with pytest.raises(InputError) as caught:
        read_model(str(tmp_path / "bad.yaml")).check_parts(argument="model")
    assert caught.value.argument == "model" and message in str(caught.value)


def test_no_such_model():
    with pytest.raises(InputError, match="wan2.1-1.3b.*hub id.*'wan2.2-5' \\(did you mean wan2.2-5b\\?\\)"):
        read_model("wan2.2-5")
