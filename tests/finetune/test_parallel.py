"""Several processes train the embedded model together: two of them, which find each other as those of `torchrun` do."""

import json
import textwrap

import pytest

from vmonarch.finetune.embedded import parallel
from vmonarch.pipelines.embedded import embedded_model_path

WORKER = """
    import hashlib, json, sys
    import torch
    from transformers import AutoTokenizer
    from vmonarch.finetune import scenes as data
    from vmonarch.finetune.embedded import parallel, text, transformer
    from vmonarch.pipelines.embedded import embedded_model_path

    TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16,
            "text_dim": text.TEXT_DIM, "freq_dim": 16, "ffn_dim": 32, "num_layers": 1, "rope_max_seq_len": 32}
    torch.set_num_threads(1)
    with parallel.process_group("cpu") as device:
        parameter = torch.nn.Parameter(torch.zeros(2, 3))
        parameter.grad = torch.full((2, 3), 1.0 + parallel.rank())
        parallel.average_gradients([parameter, torch.nn.Parameter(torch.zeros(1))])
        tokenizer = AutoTokenizer.from_pretrained(embedded_model_path() / "tokenizer")
        scenes = data.sample_scenes(4, parallel.own_seed(0))
        tokens = text.tokenize(tokenizer, data.write_captions(scenes, 0, 2), length=32).view(4, 2, 32)
        torch.manual_seed(7)
        encoder = text.build_text_encoder(len(tokenizer), num_layers=1)
        torch.manual_seed(parallel.rank())
        model, encoder, log = transformer.train_transformer(
            latents=torch.randn(4, 16, 2, 4, 4).half(), tokens=tokens, targets=text.attribute_targets(scenes),
            text_encoder=encoder, steps=3, batch=2, seed=0, device=device, config=TINY,
        )
        weights = b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), *encoder.parameters()))
        report = {
            "gradient": parameter.grad.unique().tolist(),
            "weights": hashlib.sha256(weights).hexdigest(),
            "flow": log[-1]["flow"],
            "clock": parallel.first_process_says(10.0 + parallel.rank(), device),
            "seed": parallel.own_seed(5),
        }
        with open(f"{sys.argv[1]}/{parallel.rank()}.json", "w") as file:
            json.dump(report, file)
"""


def test_two_processes_see_different_clips_and_keep_the_same_weights(forks, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    code, output = forks(tmp_path, script, tmp_path, processes=2)
    assert code == 0, output[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["gradient"] == second["gradient"] == [1.5]
    assert first["weights"] == second["weights"]
    assert first["flow"] != second["flow"]
    assert first["clock"] == second["clock"] == 10.0
    assert (first["seed"], second["seed"]) == (10, 11)


@pytest.mark.slow
def test_the_command_writes_one_model_from_two_processes(forks, tmp_path):
    # With its VAE, whose training takes longest and is tested by itself.
    arguments = ["--output", "model", "--work-dir", "work", "--quick", "--device", "cpu"]
    arguments += ["--continue-from", str(embedded_model_path())]
    code, output = forks(tmp_path, "vmonarch.finetune.embedded", *arguments, processes=2)
    assert code == 0, output[-3000:]
    for line in ('saved {"step": 2', "captions {", "latents {"):
        assert output.count(line) == 1
    from diffusers import WanPipeline

    assert WanPipeline.from_pretrained(tmp_path / "model").transformer.config.num_layers == 6


def test_a_process_alone_does_nothing_of_this():
    assert (parallel.rank(), parallel.world_size(), parallel.own_seed(5)) == (0, 1, 5)
    with parallel.process_group("cpu") as device, parallel.first_process_first():
        assert device == "cpu" and parallel.first_process_says(2.5, device) == 2.5


def test_only_cuda_and_cpu_train_in_parallel(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="device must be cuda or cpu"), parallel.process_group("mps"):
        pass
