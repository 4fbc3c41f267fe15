"""One denoising step on real footage: what is measured, repeated, refused and shown."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.configs.methods import resolve_method
from vmonarch.eval.studies import footage
from vmonarch.eval.studies.footage import Footage, decode, footage_table, measure, read_footage, shipped_clips
from vmonarch.finetune.data.decode import ClipShape
from vmonarch.pipelines.embedded import embedded_model_path

SHAPE = ClipShape(48, 80, 9, start="middle")


@pytest.fixture(scope="module")
def pipe():
    from diffusers import WanPipeline

    return WanPipeline.from_pretrained(str(embedded_model_path()))


@pytest.fixture(scope="module")
def film(pipe) -> Footage:
    return read_footage(shipped_clips()[0], SHAPE, pipe.vae, torch.device("cpu"))


def test_three_different_films_ship():
    assert [path.stem for path in shipped_clips()] == ["bigbuckbunny", "bikes", "carphone_pristine"]


def test_a_clip_goes_through_the_vae_as_the_stock_code_takes_it(pipe, film):
    assert film.frames.shape == (9, 3, 48, 80) and film.latents.shape == (1, 16, 3, 6, 10)
    assert 0 <= film.frames.min() and film.frames.max() <= 1 and film.frames.std() > 0.05
    config = pipe.vae.config
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (config.latents_mean, config.latents_std))
    with torch.no_grad():
        latents = pipe.vae.encode(film.frames.transpose(0, 1)[None] * 2 - 1).latent_dist.mode()
        frames = pipe.vae.decode(latents).sample[0].transpose(0, 1) / 2 + 0.5
    torch.testing.assert_close(film.latents, (latents - mean) / std, rtol=0, atol=1e-4)
    torch.testing.assert_close(decode(pipe.vae, film.latents), frames, rtol=0, atol=1e-4)


def test_errors_are_those_of_velocity_and_x0_against_full_attention(pipe, film):
    methods = [resolve_method(name) for name in ("full", "vmonarch:exact={band: 3}", "local")]
    noise = torch.randn(film.latents.shape, generator=torch.Generator().manual_seed(0))
    text = torch.zeros(1, 4, 128)
    full, exact, local = measure(pipe, film, noise, text, 0.5, methods)
    assert (full["velocity_error"], full["psnr_db_to_full"]) == (0.0, None)
    # A band over all three frames is full attention.
    assert exact["velocity_error"] < 1e-5 and exact["psnr_db_to_clip"] == pytest.approx(full["psnr_db_to_clip"], 1e-4)

    def velocity(name):
        resolve_method(name).install(pipe)
        x = 0.5 * film.latents + 0.5 * noise
        with torch.no_grad():
            return x, pipe.transformer(x, torch.tensor([500.0]), text, return_dict=False)[0]

    (x, v_full), (_, v_local) = velocity("full"), velocity("local")
    resolve_method("full").install(pipe)
    assert local["velocity_error"] == pytest.approx(float((v_local - v_full).norm() / v_full.norm()), rel=1e-4)
    x0 = x - 0.5 * v_full
    assert local["denoised_error"] == pytest.approx(float(0.5 * (v_local - v_full).norm() / x0.norm()), rel=1e-4)
    error = (decode(pipe.vae, x - 0.5 * v_local) - film.frames).square().mean()
    assert local["psnr_db_to_clip"] == pytest.approx(-10 * math.log10(error), abs=1e-3)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """The command's file, and that of a part of it: one clip of two, one level of two."""
    folder = tmp_path_factory.mktemp("footage")
    with pytest.MonkeyPatch.context() as patch:
        small = {"height": 48, "width": 80, "num_frames": 9}
        patch.setattr(footage, "recommended_settings", lambda folder: small)
        clips = [str(path) for path in shipped_clips()[1:]]
        for name, count in (("a.json", 2), ("b.json", 1)):
            words = ["--methods", "full", "vmonarch", "block-topk:cube=[1, 2, 2]", "--levels", *("0.3", "0.8")[:count]]
            words += ["--clips", *clips[:count], "--device", "cpu"]
            assert footage.main([*words, "--output", str(folder / name)]) == 0
    return [json.loads((folder / name).read_text()) for name in ("a.json", "b.json")]


def test_a_part_of_the_command_gives_the_same_numbers(documents):
    first, second = documents
    part = [row for row in first["results"] if row["clip"] == "bikes" and row["sigma"] == 0.3]
    assert part == second["results"] and len(part) == 3 and len(first["results"]) == 2 * 2 * 3
    assert first["clips"][:1] == second["clips"] and first["clips"][0]["name"] == "bikes"
    assert "only ever seen procedural video" in first["about"]
    assert first["command"].startswith("python -m vmonarch.eval.studies.footage --methods full vmonarch")
    assert str(shipped_clips()[0].parent) not in json.dumps(first)


def test_every_method_level_and_clip_is_there_and_noise_is_the_same_for_all(documents):
    rows = documents[0]["results"]
    keys = [(row["clip"], row["sigma"], row["method"]) for row in rows]
    assert len(set(keys)) == len(keys) == 12
    assert all(row["velocity_error"] == 0 for row in rows if row["method"] == "full")
    assert all(row["velocity_error"] > 1e-3 for row in rows if row["method"] != "full")
    shares = {method["label"]: method["attention_flops_share"] for method in documents[0]["methods"]}
    assert shares["full"] == 1.0 and 0 < shares["block-topk:cube=[1, 2, 2]"] < 0.5


def test_the_table_has_means_over_the_clips(documents):
    document = documents[0]
    text = footage_table(document)
    rows = [row for row in document["results"] if row["method"] == "vmonarch" and row["sigma"] == 0.8]
    error, near = (sum(row[key] for row in rows) / 2 for key in ("velocity_error", "psnr_db_to_full"))
    line = next(line for line in text.splitlines() if line.startswith("| vmonarch |"))
    assert f" {100 * error:.1f} |" in line and f" {near:.1f} |" in line
    assert "–" in footage_table({**document, "methods": [{"label": "full", "attention_flops_share": None}] * 2})
    assert "Made by `python -m vmonarch.eval.studies.footage" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "vmonarch"], "methods must begin with full"),
        (["--methods", "full", "local", "local"], "methods must differ"),
        (["--methods", "full", "vmonarch-dense-start"], "'vmonarch-dense-start' has"),
        (["--levels", "0"], "levels must be noise levels above 0"),
        (["--model", "no/such/folder"], "model must be"),
    ],
)
def test_bad_options_are_named_before_anything_is_computed(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        footage.main(["--output", str(tmp_path / "out.json"), "--device", "cpu", *words])
    assert message in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_files_that_give_no_clip_are_named(pipe, tmp_path):
    path = tmp_path / "broken.mp4"
    path.write_bytes(b"no video")
    with pytest.raises(InputError, match=r"clips 'broken.mp4' cannot be used"):
        read_footage(path, SHAPE, pipe.vae, torch.device("cpu"))


def test_the_committed_measurement_has_every_default_method_level_and_clip():
    document = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / "footage.json").read_text())
    keys = {(row["method"], row["sigma"], row["clip"]) for row in document["results"]}
    films = [path.stem for path in shipped_clips()]
    methods = footage.METHODS + footage.PLANS
    assert keys == set(itertools.product(methods, footage.LEVELS, films))
    lines = footage_table(document).splitlines()
    assert all(sum(line.startswith(f"| {name} |") for line in lines) == 2 for name in methods[1:])
