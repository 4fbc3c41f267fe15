"""The study of trained attention: what its peers compute, before and after they learn, and its table."""

from __future__ import annotations

import dataclasses
import queue
from typing import Any

import pytest
import torch

from vmonarch import vmonarch_attention
from vmonarch.configs import InputError
from vmonarch.eval import peers
from vmonarch.eval.studies import trained
from vmonarch.files import write_json
from vmonarch.finetune.embedded.transformer import draw_clips, project
from vmonarch.grid import LatentGrid
from vmonarch.installation import self_attention_modules
from vmonarch.pipelines.embedded import embedded_model_path
from vmonarch.two_resolution_options import TwoResolutionOptions

GRID = LatentGrid(8, 6, 5)  # four tiles of keys


def _options(share: float) -> TwoResolutionOptions:
    return TwoResolutionOptions(share=share, rest=False, tile=(4, 3, 5), query_tile=(4, 3, 5))


@pytest.fixture
def attn(tiny: Any) -> Any:
    transformer = tiny.transformer()
    return next(module for _, module in self_attention_modules(transformer))


def _inputs(attn: Any) -> torch.Tensor:
    return torch.randn(2, GRID.tokens, attn.to_q.in_features, generator=torch.Generator().manual_seed(0))


def _tiles() -> torch.Tensor:
    """[S] the tile of every token."""
    t, h, w = torch.meshgrid(*(torch.arange(size) for size in GRID), indexing="ij")
    return (t // 4 * 2 + h // 3).flatten() + 0 * w.flatten()


def _means(x: torch.Tensor) -> torch.Tensor:
    """Of x [B, H, S, D] over every tile, [B, H, 4, D]."""
    return torch.stack([x[:, :, _tiles() == i].mean(2) for i in range(4)], 2)


@torch.no_grad()
def _parts(attn: Any, x: torch.Tensor, share: float) -> tuple[torch.Tensor, ...]:
    """query, key and value [B, H, S, D], and whether key tiles are chosen for tokens [B, H, S, 4], densely."""
    q, k, v = (y.transpose(1, 2) for y in project(attn, x, x, None))
    best = (_means(q) @ _means(k).mT).topk(int(4 * share), -1).indices
    chosen = torch.zeros(*q.shape[:2], 4, 4, dtype=torch.bool).scatter(-1, best, True)
    return q, k, v, chosen[:, :, _tiles()]


@pytest.mark.parametrize("kind", ["topk", "vsa", "sla"])
@torch.no_grad()
def test_peers_begin_as_block_sparse_attention(attn, kind):
    x = _inputs(attn)
    q, k, v, chosen = _parts(attn, x, 0.5)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~chosen[..., _tiles()], -torch.inf)
    wanted = attn.to_out[0]((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(peers.PEERS[kind][0](attn, GRID, _options(0.5))(attn, x), wanted)


@torch.no_grad()
def test_sla_adds_linear_attention_to_the_other_tiles(attn):
    x = _inputs(attn)
    q, k, v, chosen = _parts(attn, x, 0.25)
    sla = peers.SLA(attn, GRID, _options(0.25))
    before = sla(attn, x)
    sla.projection.weight.normal_(generator=torch.Generator().manual_seed(1))
    weights = (q.softmax(-1) @ k.softmax(-1).mT).masked_fill(chosen[..., _tiles()], 0)
    linear = sla.projection(weights / weights.sum(-1, keepdim=True) @ v)
    added = linear.transpose(1, 2).flatten(2) @ attn.to_out[0].weight.T
    torch.testing.assert_close(sla(attn, x) - before, added, atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_vsa_adds_gated_attention_between_means(attn):
    x = _inputs(attn)
    q, k, v, _ = _parts(attn, x, 0.25)
    vsa = peers.VSA(attn, GRID, _options(0.25))
    before = vsa(attn, x)
    vsa.gate.weight.normal_(generator=torch.Generator().manual_seed(1))
    compressed = ((_means(q) @ _means(k).mT * q.shape[-1] ** -0.5).softmax(-1) @ _means(v))[:, :, _tiles()]
    added = (compressed.transpose(1, 2).flatten(2) * vsa.gate(x)) @ attn.to_out[0].weight.T
    torch.testing.assert_close(vsa(attn, x) - before, added, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("options", ["", ":exact=null,num_iterations=3", ":exact={rows: [0], band: 0}"])
@torch.no_grad()
def test_temperatures_are_those_of_monarch_attention_at_first(attn, options):
    x = _inputs(attn)
    peer, method = trained.method_of(f"tempered{options}")
    tempered = peer(attn, GRID, method.processor().options)
    wanted = vmonarch_attention(*project(attn, x, x, None), grid=GRID, options=method.processor().options)
    torch.testing.assert_close(tempered(attn, x), attn.to_out[0](wanted.flatten(2)))


@torch.no_grad()
def test_temperatures_and_the_weight_are_where_they_should_be(attn):
    x = _inputs(attn)
    peer, method = trained.method_of("tempered:exact={band: 0},num_iterations=1")
    tempered = peer(attn, GRID, method.processor().options)
    tempered.logs.normal_(generator=torch.Generator().manual_seed(1))
    inverse_r, inverse_l, weight = (log.exp()[:, None, None, None] for log in tempered.logs)
    # [B, H, P, T, D] of positions P and frames T; the scale is the queries'.
    q, k, v = (y.unflatten(1, (GRID.frames, -1)).permute(0, 3, 2, 1, 4) for y in project(attn, x, x, None))
    q = q * q.shape[-1] ** -0.5
    of_frames = lambda y: y.transpose(2, 3)  # [B, H, T, P, D]
    R = (inverse_r * of_frames(q) @ of_frames(k).mT).softmax(-1)  # [B, H, T, P, P]
    aL, cL, y = R @ of_frames(k), (R * R.log()).sum(-1), R @ of_frames(v)
    Z = inverse_l * (q @ of_frames(aL).mT - of_frames(cL[..., None]).mT)  # [B, H, P, T, T]
    exact = of_frames(q) @ of_frames(k).mT
    own = of_frames(exact.logsumexp(-1, keepdim=True)) + weight.log()
    Z = torch.cat([Z.masked_fill(torch.eye(GRID.frames, dtype=torch.bool), -torch.inf), own], -1).softmax(-1)
    out = Z[..., :-1] @ of_frames(y) + Z[..., -1:] * of_frames(exact.softmax(-1) @ of_frames(v))
    out = out.permute(0, 3, 2, 1, 4).flatten(1, 2).flatten(2)
    torch.testing.assert_close(tempered(attn, x), attn.to_out[0](out))


def test_peers_work_as_much_as_what_they_consist_of():
    sparse = "two-resolution:rest=false,share=0.25"
    found = trained.work(["full", sparse, "topk:share=0.25", "vsa:share=0.25", "sla:share=0.25"], embedded_model_path())
    assert found["full"] == 1.0 and found[sparse] == pytest.approx(0.25, abs=0.01)
    assert found["vsa:share=0.25"] == found["topk:share=0.25"] == found[sparse]
    assert found["sla:share=0.25"] - found[sparse] == pytest.approx(64 / 960)


def test_a_run_changes_its_training_by_words():
    changed = trained.Training().changed(["learning_rate=1e-4", "lora=8", "objective=flow"])
    assert changed == trained.Training(learning_rate=1e-4, lora=8, objective="flow")
    for words, named in {"rate=1": "rate", "lora=many": "lora", "objective=videos": "objective"}.items():
        with pytest.raises(InputError, match=named):
            trained.Training().changed([words])


def test_runs_of_an_earlier_output_are_kept_if_training_and_model_are_the_same(tmp_path):
    path, training = tmp_path / "trained.json", trained.Training(updates=3)
    runs = [{"run": "full", "seed": 0}, {"run": "local", "seed": 0}]
    shares = {"full": 1.0, "local": 0.25}
    write_json(path, {"training": dataclasses.asdict(training), "runs": runs, "work": shares})
    kept = lambda **changed: trained.earlier_runs(
        **{"path": path, "training": training, "runs": ["vmonarch", "full"], "shares": {"full": 1.0}} | changed
    )
    assert kept() == runs[:1]
    for changed, message in (
        ({"training": trained.Training(updates=4)}, "must be an output of the same training"),
        ({"shares": shares | {"local": 0.2}}, "must be an output of the same model, but 'local' does other work"),
        ({"path": tmp_path / "none.json"}, "holds .* which cannot be read"),
    ):
        with pytest.raises(InputError, match=f"--resume {message}"):
            kept(**changed)


def test_the_table_compares_means_over_seeds_with_full_attention():
    def run(method: str, seed: int, loss: float) -> dict[str, Any]:
        scores = {"prompt_score": 0.5, "psnr": 20.0, "ssim": 0.75, "psnr_to_shipped": 18.0}
        checks = [{"updates": 0, "flow": [0.25, 0.5]}, {"updates": 1, "flow": [loss, loss]}]
        before = scores | {"prompt_score": 0.25} if seed == 0 else None
        return {
            "run": method,
            "seed": seed,
            "checks": checks,
            "before": before,
            "after": scores,
            "also": scores | {"psnr": 30.0},
        }

    runs = [run("full", 0, 0.25), run("vmonarch", 0, 0.5), run("vmonarch", 1, 0.25)]
    results = {
        "runs": runs,
        "order": ["full", "vmonarch", "local"],
        "work": {"full": 1.0, "vmonarch": 0.25},
        "training": {"updates": 1, "batch": 2, "objective": "flow"},
        "hardware": "a machine",
        "date": "2026-11-26",
        "command": "python",
    }
    text = trained.table(results)
    assert (
        "| vmonarch | 25.0 % | 0.3750 | 0.3750 ± 0.1768 | +50.0 % | 25.0 % | 50.0 ± 0.0 % | 20.0 | 0.750 | 18.0 |"
        in text
    )
    assert "| the same weights, `also` | – | – | – | – | – | 50.0 ± 0.0 % | 30.0 | 0.750 | 18.0 |" in text
    assert "objective flow, 2 seeds" in text


@pytest.mark.gpu
def test_recorded_passes_have_the_gradients_of_others(tmp_path, monkeypatch):
    """On the last GPU, as a process of the study has it: a pass is recorded on the current one."""
    training = dataclasses.replace(trained.QUICK, batch=4, clips=8)
    device, drawn = f"cuda:{torch.cuda.device_count() - 1}", tmp_path / "drawn.pt"
    devices: queue.Queue[str] = queue.Queue()
    devices.put(device)
    monkeypatch.setattr(trained, "_bench", None)
    with torch.cuda.device(0):
        trained.draw_all(training, embedded_model_path(), device, False, drawn)
        trained._begin(embedded_model_path(), drawn, devices, True)
        bench = trained._bench
        assert bench is not None
        student = bench.student("vmonarch:plan=embedded-1.00-refined", training)
        learnt = list(student.parameters())
        passes = trained.Velocity(student, training.precision), bench.velocity_of(student, training)
        for seed in range(2):
            torch.manual_seed(seed)
            _, clean, ids, _, noise, sigma = draw_clips(bench.clips, bench.tokens, training.batch, 0.1, 3.0)
            found = []
            for predict in passes:
                (predict(clean, noise, sigma, bench.text(ids)) - noise + clean).square().mean().backward()
                found.append(torch.cat([x.grad.flatten() for x in learnt if x.grad is not None]))
                for parameter in learnt:
                    parameter.grad = None
            assert found[0].norm() > 0
            assert (found[1] - found[0]).norm() < 0.01 * found[0].norm(), seed
