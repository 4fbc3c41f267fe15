"""`vmonarch generate`: what lies on disk afterwards, that it can be made again, and that nothing is ever lost."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch

from vmonarch.configs import InputError
from vmonarch.pipelines import loading, outputs, sampling
from vmonarch.pipelines.config import GenerateConfig, build_config, complete
from vmonarch.pipelines.generation import generate
from vmonarch.pipelines.model_folder import find_model
from vmonarch.pipelines.outputs import load_record
from vmonarch.pipelines.video_io import open_image, read_video

PROMPT = "a red circle moving right"
TINY = {"height": 32, "width": 48, "num_frames": 9, "steps": 2, "negative_prompt": "", "device": "cpu"}


def config(model: Path, **values: object) -> GenerateConfig:
    return GenerateConfig(**{"prompts": (PROMPT,), "model": str(model), **TINY, **values})  # type: ignore[arg-type]


@pytest.fixture
def loaded(tiny_model: Path) -> loading.LoadedModel:
    """The tiny pipeline, and a completed config's settings with it."""
    folder = find_model(str(tiny_model))
    return loading.load_model(complete(config(tiny_model), folder), folder)


def sampled(loaded: loading.LoadedModel, prompts: list[str], seeds: list[int], **values: object) -> torch.Tensor:
    """Frames [B, F, 3, H, W] without touching the disk."""
    settings = complete(config(loaded.folder.path, **values), loaded.folder)
    settings.attention.install(loaded.pipe)
    return sampling.sample(loaded, settings, prompts, seeds).frames


def test_every_prompt_gets_every_seed(cli) -> None:
    code, out, err = cli("generate", PROMPT, "a blue square", "--seed", 3, 5, "--fps", 8)
    assert code == 0, err
    records = cli.records()
    assert [(r["prompt"], r["seed"]) for r in records] == [(p, s) for p in (PROMPT, "a blue square") for s in (3, 5)]
    folder = cli.folder / "outputs/generate"
    for number, record in enumerate(records, 1):
        assert record["video"].startswith(f"{number:04d}-") and (folder / record["contact_sheet"]).stat().st_size > 1000
        frames, fps = read_video(folder / record["video"])
        assert frames.shape == (9, 32, 48, 3) and fps == pytest.approx(8)
        assert str(Path("outputs/generate") / record["video"]) in out
    assert len({record["frames_sha256"] for record in records}) == 4
    assert len(cli.outputs()) == 12
    assert not any("circle" in name or "square" in name or name.startswith(".") for name in cli.outputs())


def test_the_record_tells_all(cli) -> None:
    code, _, err = cli("generate", PROMPT, "--attention", "vmonarch-t3", "min_mass=0.2")
    assert code == 2 and "min_mass" in err, "parameters of the method need their prefix"
    code, _, err = cli("generate", PROMPT, "--attention", "vmonarch-t3", "attention.min_mass=0.2")
    assert code == 0, err
    (record,) = cli.records()
    assert record["config"]["attention"]["num_iterations"] == 3 and record["config"]["attention"]["min_mass"] == 0.2
    assert record["config"]["steps"] == 2 and record["config"]["max_sequence_length"] == 512
    assert all(value is not None for key, value in record["config"].items() if key not in OPTIONAL)
    assert record["environment"]["packages"]["torch"] == version("torch") and record["environment"]["device"] == "cpu"
    assert {"vmonarch", "git_commit", "device_name"} <= record["environment"].keys()
    assert {"load", "text", "denoise", "transformer", "decode", "total"} == record["seconds"].keys()
    seconds = record["seconds"]
    assert 0 < seconds["transformer"] < seconds["denoise"] < seconds["total"]
    assert record["transformer_calls"] == 4, "two steps, each with and without the prompt"
    assert record["peak_memory_bytes"]["process_rss"] > 10**7
    assert len(record["model"]["configs_sha256"]) == len(record["model"]["weights_sha256"]) == 64
    assert record["model"]["dtype"] == record["model"]["vae_dtype"] == "float32"


OPTIONAL = ("revision", "scheduler", "image", "guidance_2", "true_guidance", "flow_shift")


def test_from_json_makes_the_same_video_again(cli) -> None:
    assert cli("generate", PROMPT, "a blue square", "--seed", 7, "--guidance", 1)[0] == 0
    folder = cli.folder / "outputs/generate"
    before = cli.records()
    for record in before:
        name = record["video"].replace(".mp4", ".json")
        code, _, err = cli("generate", "--from-json", folder / name, "--quiet", tiny=False)
        assert code == 0, err
    after = cli.records()[2:]
    assert [r["frames_sha256"] for r in after] == [r["frames_sha256"] for r in before]
    assert before[0]["transformer_calls"] == 2, "two steps without guidance"
    for old, new in zip(before, after, strict=True):
        assert (folder / old["video"]).read_bytes() == (folder / new["video"]).read_bytes()
        assert {**old["config"], "output_dir": ""} == {**new["config"], "output_dir": ""}


def test_from_json_with_overrides_makes_another_video(cli) -> None:
    assert cli("generate", PROMPT, "--attention", "full")[0] == 0
    first = cli.outputs()[0].split(".")[0]
    path = f"outputs/generate/{first}.json"
    code, _, err = cli("generate", "--from-json", path, "--seed", 4, "attention=vmonarch-t1", tiny=False)
    assert code == 0, err
    old, new = cli.records()
    assert new["seed"] == 4 and new["config"]["attention"]["num_iterations"] == 1
    assert new["frames_sha256"] != old["frames_sha256"] and new["prompt"] == PROMPT


def test_from_json_refuses_a_changed_model(cli, broken_model: Path) -> None:
    assert cli("generate", PROMPT, model=broken_model)[0] == 0
    path = f"outputs/generate/{cli.outputs()[0].split('.')[0]}.json"
    weights = next((broken_model / "transformer").glob("*.safetensors"))
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 2 and "--from-json" in err and "weights have changed" in err


def test_full_attention_is_the_stock_pipeline(tiny_model: Path, loaded: loading.LoadedModel) -> None:
    from diffusers import WanPipeline

    stock = WanPipeline.from_pretrained(tiny_model)
    stock.set_progress_bar_config(disable=True)
    expected = stock(
        PROMPT,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=3,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(11),
        output_type="pt",
    ).frames
    assert torch.equal(sampled(loaded, [PROMPT], [11], attention="full", steps=3), expected)


def test_attention_methods_differ_and_leave_no_trace(loaded: loading.LoadedModel) -> None:
    full = sampled(loaded, [PROMPT], [0], attention="full")
    fast = sampled(loaded, [PROMPT], [0], attention="vmonarch-plain")
    longer = sampled(loaded, [PROMPT], [0], attention="vmonarch-plain:num_iterations=5")
    assert not torch.equal(full, fast) and not torch.equal(fast, longer)
    assert torch.equal(sampled(loaded, [PROMPT], [0], attention="full"), full)
    everything = sampled(loaded, [PROMPT], [0], attention="vmonarch:exact.band=99")
    assert torch.allclose(everything, full, atol=1e-4), "all blocks exact is full attention"


def test_a_seed_means_the_same_in_any_batch(loaded: loading.LoadedModel) -> None:
    alone = sampled(loaded, [PROMPT], [5])
    together = sampled(loaded, ["a blue square", PROMPT, PROMPT], [1, 5, 6])
    assert torch.allclose(together[1], alone[0], atol=1e-4)
    assert not torch.allclose(together[2], alone[0], atol=1e-2)


@pytest.mark.parametrize(
    "change",
    [{"guidance": 2.0}, {"negative_prompt": "blue"}, {"flow_shift": 9.0}, {"steps": 3}, {"max_sequence_length": 8}],
    ids=str,
)
def test_settings_reach_the_pipeline(tiny_model: Path, loaded: loading.LoadedModel, change: dict) -> None:
    folder = find_model(str(tiny_model))
    changed = complete(config(tiny_model, attention="full", **change), folder)
    other = loading.load_model(changed, folder)
    frames = sampling.sample(other, changed, [PROMPT], [0]).frames
    assert not torch.equal(frames, sampled(loaded, [PROMPT], [0], attention="full"))


def test_a_record_of_before_is_read_where_what_is_gone_changed_nothing(cli) -> None:
    assert cli("generate", PROMPT)[0] == 0
    (path,) = (cli.folder / "outputs/generate").glob("*.json")
    record = json.loads(path.read_text())
    record["config"] |= {"batch_guidance": False}
    record["config"]["attention"]["parallel_by"] = "heads"
    path.write_text(json.dumps(record))
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 0, err
    path.write_text(json.dumps(record | {"config": record["config"] | {"batch_guidance": True}}))
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 2 and "batch_guidance is gone" in err


def test_image_to_video(cli, tiny_image_model: Path) -> None:
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(cli.folder / "first.png")
    Image.fromarray(255 - pixels).save(cli.folder / "other.png")
    for name in ("first.png", "other.png"):
        code, _, err = cli(
            "generate", PROMPT, "a blue square", "--batch-size", 2, "--image", name, model=tiny_image_model
        )
        assert code == 0, err
    first, _, other, _ = cli.records()
    assert first["frames_sha256"] != other["frames_sha256"]
    assert first["model"]["image_sha256"] != other["model"]["image_sha256"]
    code, _, err = cli("generate", "--from-json", f"outputs/generate/{cli.outputs()[0].split('.')[0]}.json", tiny=False)
    assert code == 0, err
    assert cli.records()[-1]["model"]["image_sha256"] == first["model"]["image_sha256"]


def pictures(folder: Path) -> dict[str, tuple[Path, str]]:
    """Picture files that show the same first frame of 48×32, red at the left, and what of them it does not show."""
    from PIL import Image

    frame = np.zeros((32, 48, 3), np.uint8)
    frame[:, :24, 0] = 200
    plain = Image.fromarray(frame)
    turned = plain.getexif()
    turned[0x0112] = 6
    clear = np.dstack([frame, np.full((32, 48), 255, np.uint8)])
    clear[:, 24:] = (0, 0, 250, 0)
    wide = np.pad(frame, ((0, 0), (16, 16), (0, 0)), constant_values=255)
    tall = np.pad(frame, ((8, 8), (0, 0), (0, 0)), constant_values=255)
    made = {
        "plain": (plain, {}, ""),
        "turned": (plain.transpose(Image.Transpose.ROTATE_90), {"exif": turned}, ""),
        "opaque": (plain.convert("RGBA"), {}, ""),
        "clear": (Image.fromarray(clear), {}, "transparent pixels are laid over black"),
        "wide": (Image.fromarray(wide), {}, "80×32 is cropped to 48×32, the shape of 48×32"),
        "tall": (Image.fromarray(tall), {}, "48×48 is cropped to 48×32, the shape of 48×32"),
    }
    for name, (picture, options, _) in made.items():
        picture.save(folder / f"{name}.png", **options)
    return {name: (folder / f"{name}.png", changes) for name, (*_, changes) in made.items()}


def test_pictures_are_shown_as_they_are_meant(tmp_path: Path) -> None:
    made = pictures(tmp_path)
    expected = np.asarray(open_image(str(made["plain"][0]), 32, 48)[0])
    assert expected.shape == (32, 48, 3) and (expected[:, :24] == (200, 0, 0)).all() and not expected[:, 24:].any()
    for name, (path, changes) in made.items():
        frame, said = open_image(str(path), 32, 48)
        assert (np.asarray(frame) == expected).all() and said == changes, name


def test_a_colour_profile_is_converted_to_srgb(tmp_path: Path) -> None:
    from PIL import Image, ImageCms

    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    # Its red is green, and its green red.
    swapped = srgb.replace(b"rXYZ", b"????", 1).replace(b"gXYZ", b"rXYZ", 1).replace(b"????", b"gXYZ", 1)
    picture = Image.new("RGB", (32, 16), (200, 100, 50))
    for profile, shown in ((srgb, (200, 100, 50)), (swapped, (100, 200, 50))):
        picture.save(tmp_path / "a.png", icc_profile=profile)
        frame = np.asarray(open_image(str(tmp_path / "a.png"), 16, 32)[0]).astype(int)
        assert abs(frame - shown).max() <= 1
    picture.save(tmp_path / "a.png", icc_profile=b"no profile")
    with pytest.raises(InputError, match="colour profile that cannot be used"):
        open_image(str(tmp_path / "a.png"), 16, 32)


def test_sixteen_bits_of_grey_become_eight(tmp_path: Path) -> None:
    from PIL import Image

    levels = np.arange(256, dtype=np.uint16).repeat(2).reshape(16, 32) * 257
    for name in ("grey.png", "grey.tiff"):
        Image.fromarray(levels).save(tmp_path / name)
        frame, _ = open_image(str(tmp_path / name), 16, 32)
        assert (np.asarray(frame) == (levels // 257)[..., None]).all()
    Image.fromarray(levels).save(tmp_path / "clear.png", transparency=65535)
    frame, changes = open_image(str(tmp_path / "clear.png"), 16, 32)
    assert (np.asarray(frame) == (levels // 257 % 255)[..., None]).all() and "transparent" in changes
    Image.fromarray(levels.astype(np.float32)).save(tmp_path / "grey.tiff")
    with pytest.raises(InputError, match="must have 8 or 16 bits a channel"):
        open_image(str(tmp_path / "grey.tiff"), 16, 32)


def test_a_cropped_image_is_told_and_recorded(cli, tiny_image_model: Path) -> None:
    hashes = {}
    made = pictures(cli.folder)
    for name in ("plain", "wide"):
        caught = (
            contextlib.nullcontext() if name == "plain" else pytest.warns(UserWarning, match="image: 80×32 is crop")
        )
        with caught:
            code, _, err = cli("generate", PROMPT, "--image", made[name][0], model=tiny_image_model)
        assert code == 0, err
        record = cli.records()[-1]
        assert record["model"]["image_changes"] == made[name][1]
        hashes[name] = record["frames_sha256"]
    assert hashes["plain"] == hashes["wide"]


def test_two_transformers_have_a_guidance_each(cli, tiny_two_stage_model: Path) -> None:
    for guidance in (1, 6):
        line = ["--guidance-2", guidance, "--steps", 4]
        code, _, err = cli("generate", PROMPT, *line, model=tiny_two_stage_model)
        assert code == 0, err
    first, second = cli.records()
    assert first["frames_sha256"] != second["frames_sha256"] and first["transformer_calls"] == 8
    attention = [record["config"]["attention"]["name"] for record in (first, second)]
    assert attention == ["vmonarch", "vmonarch"] and first["config"]["guidance_2"] == 1.0


def test_one_model_for_text_and_image(cli, tiny_token_timestep_model: Path) -> None:
    from PIL import Image

    Image.new("RGB", (48, 32), (200, 30, 30)).save(cli.folder / "first.png")
    for words in ([], ["--image", "first.png"]):
        code, _, err = cli("generate", PROMPT, *words, model=tiny_token_timestep_model)
        assert code == 0, err
    text, image = cli.records()
    assert (text["model"]["pipeline"], image["model"]["pipeline"]) == ("WanPipeline", "WanImageToVideoPipeline")
    assert Path(image["config"]["image"]).is_absolute()


def test_a_hub_model_is_recorded_with_its_commit(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    snapshot = shutil.copytree(cli.model, cli.folder / "snapshots/0123abcd")
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        wanted = ["model_index.json", "vae/model.safetensors", "tokenizer/chat_template.jinja"]
        others = ["of-other-programs.safetensors", "vae/model.bin"]
        assert list(filter_repo_objects(wanted + others, allow_patterns=allow_patterns)) == wanted
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert cli("generate", PROMPT, "--revision", "main", model="owner/name")[0] == 0
    (record,) = cli.records()
    assert (record["config"]["model"], record["config"]["revision"]) == ("owner/name", "0123abcd")
    path = f"outputs/generate/{cli.outputs()[0].split('.')[0]}.json"
    code, _, err = cli("generate", "--from-json", path, tiny=False)
    assert code == 0, err
    assert asked == [("owner/name", "main"), ("owner/name", "0123abcd")]


def test_nothing_is_overwritten_unless_asked(cli) -> None:
    assert cli("generate", PROMPT)[0] == 0
    folder = cli.folder / "outputs/generate"
    before = {name: (folder / name).read_bytes() for name in cli.outputs()}
    assert cli("generate", PROMPT)[0] == 0
    assert len(cli.outputs()) == 6 and [name[:4] for name in cli.outputs()] == ["0001"] * 3 + ["0002"] * 3
    assert all((folder / name).read_bytes() == data for name, data in before.items())
    created = cli.records()[0]["created"]
    time.sleep(1.1)
    assert cli("generate", PROMPT, "--overwrite")[0] == 0
    assert len(cli.outputs()) == 6 and cli.records()[0]["created"] > created
    path = folder / cli.records()[0]["video"].replace(".mp4", ".json")
    assert cli("generate", "--from-json", path, tiny=False)[0] == 0
    assert len(cli.outputs()) == 9, "a record does not hand its permission to overwrite on"


def test_numbers_held_by_others_are_left_alone(tmp_path: Path) -> None:
    with outputs.reserve_number(tmp_path) as first, outputs.reserve_number(tmp_path) as second:
        assert (first, second) == ("0001", "0002")
        (tmp_path / "0007-abc.mp4").touch()
        with outputs.reserve_number(tmp_path) as third:
            assert third == "0008"
    assert os.listdir(tmp_path) == ["0007-abc.mp4"]


@pytest.mark.parametrize("broken", ["black", "nan", "flat"])
def test_a_broken_video_is_an_error_and_its_tensor_is_kept(cli, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    from safetensors.torch import load_file

    decode = sampling.decode

    def second_is_broken(pipe, latents: torch.Tensor) -> torch.Tensor:
        frames = decode(pipe, latents)
        frames[1] = {"black": 0.0, "nan": float("nan"), "flat": 0.7}[broken]
        return frames

    monkeypatch.setattr(sampling, "decode", second_is_broken)
    code, out, err = cli("generate", PROMPT, "--seed", 1, 2, 3, "--batch-size", 3, "--quiet")
    assert out.split() == [f"outputs/generate/{name}" for name in cli.outputs() if name.endswith(".mp4")]
    assert code == 1 and "seed 2" in err and "2 of 3 videos were made" in err
    assert ("NaN" if broken == "nan" else "constant") in err
    assert [record["seed"] for record in cli.records()] == [1, 3]
    (kept,) = [name for name in cli.outputs() if name.endswith(".raw.safetensors")]
    assert kept in err
    tensors = load_file(cli.folder / "outputs/generate" / kept)
    assert tensors["frames"].shape == (9, 3, 32, 48) and tensors["latents"].shape == (4, 3, 4, 6)
    assert not [name for name in cli.outputs() if name.startswith(".")]


def test_a_video_that_decodes_wrongly_is_an_error(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmonarch.pipelines import video_io

    encode = video_io.encode_video
    monkeypatch.setattr(video_io, "encode_video", lambda path, frames, fps: encode(path, frames[:-1], fps))
    code, _, err = cli("generate", PROMPT)
    assert code == 1 and "decodes to shape" in err
    assert [name.split(".", 1)[1] for name in cli.outputs()] == ["raw.safetensors"]


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(cli, monkeypatch: pytest.MonkeyPatch) -> None:

    folder = cli.folder / "outputs"
    temporary = cli.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(outputs.tempfile, "tempdir", str(temporary))
    fsync = os.fsync

    def full(descriptor: int) -> None:
        if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = cli("generate", PROMPT)
    assert code == 1 and "No space left on device" in err and cli.outputs() == []
    (kept,) = temporary.rglob("*.raw.safetensors")
    assert str(kept) in err


def test_a_file_size_limit_reaches_ffmpeg_and_leaves_nothing(cli, tiny_model: Path) -> None:
    """A real failure of the operating system's write, in ffmpeg itself."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
    run = subprocess.run(
        [sys.executable, "-m", "vmonarch", "generate", PROMPT, "--model", str(tiny_model), *map(str, SIZE)],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(cli.folder), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert run.returncode == 1, run.stderr
    assert "Traceback" not in run.stderr and "no room to keep" in run.stderr
    assert cli.outputs() == []


SIZE = ["--height", 32, "--width", 48, "--num-frames", 9, "--steps", 2, "--negative-prompt", ""]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminate"])
def test_an_interrupted_run_leaves_complete_videos_only(cli, forks, tiny_model: Path, number: int, code: int) -> None:
    steps = ["generate", PROMPT, "--model", tiny_model, *SIZE, "--seed", *range(500), "--quiet"]
    (process,) = forks.start(cli.folder, "vmonarch", *map(str, steps))
    deadline = time.monotonic() + 90
    # At the sight of the second video's JSON the first video is complete; that of the second may be taken back.
    while len([name for name in cli.outputs() if re.fullmatch(r"[^.].*json", name)]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process, number)
    ended, err = forks.wait()
    assert ended == code and "Traceback" not in err, err
    said = "vmonarch generate: interrupted; nothing half-written is left" in err
    assert said == (number == signal.SIGINT)
    names = cli.outputs()
    assert not [name for name in names if name.startswith(".")]
    stems = {name.split(".")[0] for name in names}
    assert len(names) == 3 * len(stems) >= 3
    for name in names:
        if name.endswith(".mp4"):
            assert read_video(cli.folder / "outputs/generate" / name)[0].shape == (9, 32, 48, 3)


def test_ctrl_c_while_writing_takes_the_video_back(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from vmonarch.pipelines import video_io

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(video_io, "contact_sheet", interrupted)
    code, _, err = cli("generate", PROMPT)
    assert code == 130 and "interrupted" in err and cli.outputs() == []


def test_ctrl_c_within_a_transformer_call_stays_ctrl_c(loaded: loading.LoadedModel) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    hook = loaded.pipe.transformer.blocks[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampled(loaded, [PROMPT], [0], attention="full")
    hook.remove()
    assert not loaded.pipe.transformer._forward_pre_hooks and not loaded.pipe.transformer._forward_hooks


def test_quiet_prints_paths_only(cli) -> None:
    code, out, err = cli("generate", PROMPT, "--quiet", "--no-contact-sheet")
    assert code == 0 and err == ""
    assert out.splitlines() == [f"outputs/generate/{name}" for name in cli.outputs() if name.endswith(".mp4")]
    assert len(cli.outputs()) == 2 and cli.records()[0]["contact_sheet"] is None


def test_config_file_options_and_overrides_lie_in_that_order(cli) -> None:
    (cli.folder / "a.yaml").write_text(
        "guidance: 3.0\nfps: 5\nseeds: [8]\nprompts: [a blue square]\nattention: {name: vmonarch, num_iterations: 4}\n"
    )
    line = ["--config", "a.yaml", "--guidance", 2, "guidance=1.5", "attention.coarse=2"]
    code, _, err = cli("generate", *line)
    assert code == 0, err
    (record,) = cli.records()
    settings = record["config"]
    assert (settings["guidance"], settings["fps"], record["seed"], record["prompt"]) == (1.5, 5.0, 8, "a blue square")
    assert settings["attention"]["num_iterations"] == 4 and settings["attention"]["coarse"] == 2


def test_another_method_drops_the_options_of_the_one_below() -> None:
    below = {"attention": {"name": "vmonarch", "num_iterations": 4}}
    assert build_config(GenerateConfig, below, {"attention": "full"}).attention.label == "full"
    merged = build_config(GenerateConfig, below, {"attention": {"coarse": 2}}).attention
    assert (merged.options["num_iterations"], merged.options["coarse"]) == (4, 2)
    assert merged.label == "vmonarch:num_iterations=4,coarse=2"


@pytest.mark.parametrize("prompt", ["${oc.env:HOME}", "???", "../../E=mc2", "漢字 🎈; 50% off\nnow"])
def test_prompts_are_text_and_nothing_else(cli, prompt: str) -> None:
    (cli.folder / "p.yaml").write_text(json.dumps({"prompts": [prompt]}, ensure_ascii=False), encoding="utf-8")
    assert cli("generate", "--config", "p.yaml", "--steps", 1, "--no-contact-sheet")[0] == 0
    assert cli.records()[0]["prompt"] == prompt
    assert all(name.startswith("0001-") and len(name.split(".")[0]) == 13 for name in cli.outputs())


def test_a_prompt_is_enough(cli) -> None:
    """The shipped model at its own size; few frames and steps, for speed."""
    code, _, err = cli("generate", "a red circle moving right", "--num-frames", 13, "--steps", 3, tiny=False)
    assert code == 0, err
    (record,) = cli.records()
    assert record["config"]["model"] == record["model"]["name"] == "embedded"
    frames, _ = read_video(cli.folder / "outputs/generate" / record["video"])
    assert frames.shape == (13, 96, 160, 3)
    assert record["model"]["weights_sha256"] is not None and record["model"]["weights_bytes"] < 16 * 2**20


def test_prompt_file(cli) -> None:
    (cli.folder / "p.txt").write_text("\ufeffa red circle\n\n  a blue square  \n", encoding="utf-8")
    assert cli("generate", "a green square", "--prompt-file", "p.txt", "--steps", 1)[0] == 0
    assert [record["prompt"] for record in cli.records()] == ["a green square", "a red circle", "a blue square"]


def test_library_use(tiny_model: Path, tmp_path: Path, loaded: loading.LoadedModel) -> None:
    settings = config(tiny_model, seeds=(1, 2), output_dir=str(tmp_path / "out"))
    videos = generate(settings, model=loaded)
    assert [video.record["seed"] for video in videos] == [1, 2]
    assert all(video.video.is_file() and video.contact_sheet and video.contact_sheet.is_file() for video in videos)
    recorded = load_record(str(videos[1].record_path))
    again = generate(build_config(GenerateConfig, recorded.values), recorded=recorded)
    assert again[0].record["frames_sha256"] == videos[1].record["frames_sha256"]


@pytest.mark.parametrize("change", [{"flow_shift": 9.0}, {"dtype": "bfloat16"}, {"device": "auto"}], ids=str)
def test_a_loaded_pipeline_is_not_run_with_other_settings(
    loaded: loading.LoadedModel, tmp_path: Path, change: dict
) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be .* with which the pipeline was loaded"):
        generate(config(loaded.folder.path, output_dir=str(tmp_path), **change), model=loaded)
    assert not list(tmp_path.iterdir())
