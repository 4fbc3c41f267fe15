"""Runs along real footage: the path, the errors of each step, the table."""

import json
from pathlib import Path

import pytest
import torch

from vmonarch.configs.methods import resolve_method
from vmonarch.eval.record import names_now
from vmonarch.eval.studies import footage, footage_run
from vmonarch.eval.studies.footage import Footage, read_footage, relative_error, shipped_clips
from vmonarch.eval.studies.footage_run import footage_run_table, velocities_of_run
from vmonarch.finetune.data.decode import ClipShape
from vmonarch.pipelines.embedded import embedded_model_path

SHAPE = ClipShape(48, 80, 9, start="middle")


@pytest.fixture(scope="module")
def pipe():
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(str(embedded_model_path()))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def film(pipe) -> Footage:
    return read_footage(shipped_clips()[0], SHAPE, pipe.vae, torch.device("cpu"))


def test_every_step_is_computed_on_the_path_whatever_was_predicted_before(pipe, film):
    noise = torch.randn(film.latents.shape, generator=torch.Generator().manual_seed(0))
    text, seen = torch.zeros(1, 4, 128), []
    own = pipe.scheduler
    resolve_method("local").install(pipe)
    hook = pipe.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs["hidden_states"], float(kwargs["timestep"]))), with_kwargs=True
    )
    found = velocities_of_run(pipe, film, noise, text, SHAPE, 4)
    hook.remove()
    assert len(found) == len(seen) == 4 and pipe.scheduler is own
    pipe.scheduler.set_timesteps(4)
    for (x, timestep), sigma, expected in zip(seen, pipe.scheduler.sigmas, pipe.scheduler.timesteps, strict=False):
        assert timestep == float(expected)
        torch.testing.assert_close(x, (1 - sigma) * film.latents + sigma * noise)
    # The same as calls of the transformer alone.
    x, timestep = seen[2]
    with torch.no_grad():
        alone = pipe.transformer(x, torch.tensor([timestep]), text, return_dict=False)[0]
    assert relative_error(found[2], alone) < 1e-5


def test_exact_steps_have_no_error_and_the_table_has_the_means(monkeypatch, tmp_path, capsys):
    small = {"height": 48, "width": 80, "num_frames": 9}
    monkeypatch.setattr(footage, "recommended_settings", lambda folder: small)
    path, clips = tmp_path / "run.json", [str(path) for path in shipped_clips()[:2]]
    words = ["--methods", "full", "local:refresh=[0,2]", "vmonarch-plain", "--steps", "4", "--clips", *clips]
    assert footage_run.main([*words, "--output", str(path), "--device", "cpu"]) == 0
    document = json.loads(path.read_text())
    rows = {(row["clip"], row["method"]): row["velocity_errors"] for row in document["results"]}
    assert len(rows) == 6 and all(len(errors) == 4 for errors in rows.values())
    for clip in document["clips"]:
        assert rows[clip, "full"] == [0.0] * 4
        renewed = rows[clip, "local:refresh=[0,2]"]
        assert renewed[0] < 1e-6 and renewed[2] < 1e-6 and min(renewed[1], renewed[3]) > 1e-3
        assert min(rows[clip, "vmonarch-plain"]) > 1e-3
    errors = [rows[clip, "local:refresh=[0,2]"] for clip in document["clips"]]
    all_steps, last = sum(map(sum, errors)) / 8, sum(e[3] for e in errors) / 2
    (line,) = [line for line in footage_run_table(document).splitlines() if line.startswith("| local")]
    cells = [cell.strip() for cell in line.split("|")[3:-1]]
    assert cells == [f"{100 * x:.1f}" for x in (all_steps, 0.0, sum(e[1] for e in errors) / 2, 0.0, last)]
    assert line in capsys.readouterr().out


def test_bad_options_are_named_before_anything_is_computed(tmp_path, capsys):
    for words, message in (
        (["--methods", "vmonarch"], "methods must begin with full"),
        (["--methods", "full", "local", "local"], "methods must differ"),
        (["--model", "no/such/folder"], "model must be"),
    ):
        with pytest.raises(SystemExit):
            footage_run.main(["--output", str(tmp_path / "out.json"), "--device", "cpu", *words])
        assert message in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_the_committed_measurement_has_every_default_method_and_clip():
    path = Path(__file__).parents[2] / "docs" / "benchmarks" / "footage-run.json"
    document = names_now(json.loads(path.read_text()))
    assert [method["label"] for method in document["methods"]] == [*footage_run.METHODS, *footage_run.PLANS]
    assert len(document["results"]) == len(document["methods"]) * len(shipped_clips())
    assert all(len(row["velocity_errors"]) == document["settings"]["steps"] == 50 for row in document["results"])
