"""The table of finetuned methods: what is written, from a run of one step."""

import json

import pytest
import torch

from vmonarch.eval.studies import finetune_scores

SMALL = ["--clips", "1", "--held-out", "1", "--prompts", "1", "--sampling-steps", "1", "--device", "cpu",
         "--processes", "1"]  # fmt: skip
ONE = ["steps=1", "batch_size=1", "micro_batch=1", "precision=fp32"]


@pytest.mark.slow
def test_every_method_is_scored_before_and_after(tmp_path, monkeypatch):
    made = []

    def generate(pipe, prompts, **options):
        made.append((pipe, options["steps"]))
        return torch.rand(len(prompts), 9, 96, 160, 3, generator=torch.Generator().manual_seed(len(made)))

    monkeypatch.setattr(finetune_scores, "generate", generate)
    finetune_scores.main([*ONE, *SMALL, "--output", str(tmp_path / "scores.json"), "--methods", "vmonarch-t1"])
    document = json.loads((tmp_path / "scores.json").read_text())
    found = document["results"]["vmonarch-t1"]
    # The shipped model twice, as reference and before; then the one that was exported.
    weights = [pipe.transformer.blocks[0].ffn.net[2].weight for pipe, _ in made]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert 0 < found["validation_loss"]["after"] != found["validation_loss"]["before"] > 0
    assert found["before"].keys() == found["after"].keys() >= {"colour", "direction", "psnr_db", "ssim"}
    assert document["settings"]["steps"] == 1 and document["left_out"] == []
    # The table needs the control.
    document["results"]["full"] = found
    assert "vmonarch-t1" in finetune_scores.finetune_table(document)
    assert str(tmp_path) not in (tmp_path / "scores.json").read_text()


def test_processes_take_one_method_each_and_none_after_the_budget(tmp_path, monkeypatch, forkserver):
    monkeypatch.setattr(finetune_scores.multiprocessing, "get_context", {"spawn": forkserver}.get)
    # No method is begun, so clips and videos of the shipped model are not needed.
    monkeypatch.setattr(finetune_scores, "make_clips", lambda *_: None)
    monkeypatch.setattr(finetune_scores, "generate", lambda *_, **options: torch.zeros(1))
    path = tmp_path / "scores.json"
    finetune_scores.main(
        [*ONE, *SMALL, "--processes", "2", "--output", str(path), "--methods", "full", "vmonarch", "--budget", "0"]
    )
    document = json.loads(path.read_text())
    assert document["results"] == {} and document["left_out"] == ["full", "vmonarch"]


def test_unknown_methods_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        finetune_scores.main([*SMALL, "--output", str(tmp_path / "x.json"), "--methods", "sparse"])
    assert "--methods must be one of" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        finetune_scores.main(["stepps=1", *SMALL, "--output", str(tmp_path / "x.json")])
    assert "stepps is no known key" in capsys.readouterr().err
    for updates in (["2", "1"], ["0", "1"]):
        with pytest.raises(SystemExit):
            finetune_scores.main([*SMALL, "--output", str(tmp_path / "x.json"), "--updates", *updates])
        assert "--updates must be positive and ascending" in capsys.readouterr().err
