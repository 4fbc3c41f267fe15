"""`accelerate launch` on two GPUs: weights spread by FSDP or copied by DDP, resumed exactly and exported."""

import json
import subprocess
import sys

import diffusers
import pytest
import torch

from vmonarch.finetune.data.parquet import write_shard
from vmonarch.finetune.export import export

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FSDP = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap", "WanTransformerBlock"]  # fmt: skip
ENGINES = {"ddp": ["--multi_gpu"], "fsdp": FSDP}
SETTINGS = ["batch_size=4", "micro_batch=1", "trackers=[]", "log_every=1",
            "optimizer.learning_rate=1e-3", "checkpoints.every=3", "data.caption_dropout=0.3"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    tiny.pipeline("t2v").save_pretrained(folder / "model")
    write_shard(folder / "clips" / "a.parquet", tiny.clips(0, 7))
    write_shard(folder / "held-out" / "a.parquet", tiny.clips(100, 3))
    return folder


def launch(place, output, engine, *overrides, processes=2):
    words = [f"model={place / 'model'}", f"data.path={place / 'clips'}", f"data.validation={place / 'held-out'}"]
    words += [f"output_dir={output}", "validation.clips=3", "validation.every=3", *SETTINGS, *overrides]
    spread = ENGINES[engine] if processes > 1 else []
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(processes),
               "--num_machines", "1", "--mixed_precision", "bf16", "--dynamo_backend", "no",
               "--main_process_port", "0", *spread, "-m", "vmonarch.finetune", *words]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    keep = ("step", "loss", "gradient_norm", "validation_loss")
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in keep if name in line} for line in lines]


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_gpus_resume_as_if_they_had_not_ended(place, tmp_path, engine, rank):
    options = [f"lora.rank={rank}"]
    whole = launch(place, tmp_path / "whole", engine, "steps=6", *options)
    launch(place, tmp_path / "parts", engine, "steps=3", *options)
    parts = launch(place, tmp_path / "parts", engine, "steps=6", *options)
    assert whole == parts and len([line for line in whole if "loss" in line]) == 6
    saved = tmp_path / "parts" / "checkpoints" / "step-00000006"
    assert json.loads((saved / "run.json").read_text())["world_size"] == 2
    made = tmp_path / ("layers.safetensors" if rank else "model")
    export(tmp_path / "parts", made)
    pipe = diffusers.WanPipeline.from_pretrained(place / "model" if rank else made)
    if rank:
        pipe.load_lora_weights(made)
    stock = diffusers.WanTransformer3DModel.from_pretrained(place / "model" / "transformer").state_dict()
    found = pipe.transformer.state_dict()
    assert found.keys() >= stock.keys() or rank
    moved = [name for name, tensor in found.items() if name not in stock or not torch.equal(tensor, stock[name])]
    assert moved and all(tensor.isfinite().all() for tensor in found.values())


def test_processes_that_share_clips_learn_what_one_learns_and_spread_weights_what_copies_learn(place, tmp_path):
    options = {"one": (), "shared": ("sequence_parallel_size=2",), "copied": (), "spread": ()}
    options["both"] = options["shared"]
    loss = {}
    for name, more in options.items():
        engine = "fsdp" if name in ("spread", "both") else "ddp"
        words = ["steps=12", *more]
        lines = launch(place, tmp_path / name, engine, *words, processes=1 if name == "one" else 2)
        loss[name] = torch.tensor([line["loss"] for line in lines if "loss" in line])
    assert len(loss["one"]) == 12
    torch.testing.assert_close(loss["shared"], loss["one"], rtol=0.02, atol=0)
    torch.testing.assert_close(loss["both"], loss["one"], rtol=0.02, atol=0)
    # FSDP keeps bfloat16 copies of all weights, autocast of those of products.
    torch.testing.assert_close(loss["spread"], loss["copied"], rtol=0.02, atol=0)
