"""Flow matching: noise levels, what the models are given, and the loss."""

import pytest
import torch

from vmonarch.finetune.config import ObjectiveConfig
from vmonarch.finetune.objective import Objective

SHAPE = (2, 16, 3, 4, 6)


class Recorder:
    """A model that keeps what it is given and answers with a constant."""

    def __init__(self, answer=0.0):
        self.answer = answer

    def __call__(self, **given):
        self.given = given
        return (torch.full_like(given["hidden_states"][:, :16], self.answer),)


@pytest.mark.parametrize("distribution", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_levels_have_the_distribution_that_is_asked_for(distribution, shift):
    levels = Objective(options=ObjectiveConfig(distribution, mean=0.3, std=0.8), shift=shift)
    sigma = levels.levels((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    generator = torch.Generator().manual_seed(0)
    plain = torch.rand(200_000, generator=generator)
    if distribution == "logit_normal":
        plain = (0.3 + 0.8 * torch.randn(200_000, generator=generator)).sigmoid()
    plain = shift * plain / (1 + (shift - 1) * plain)
    quantiles = torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99])
    for quantile in quantiles.tolist():
        assert abs(sigma.quantile(quantile) - plain[:200_000].sort().values[int(quantile * 200_000)]) < 0.01
    within = levels.levels((torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000, 0.25, 0.75)
    inside = sigma[(sigma > 0.25) & (sigma < 0.75)]
    assert (within.quantile(quantiles) - inside.quantile(quantiles)).abs().max() < 1e-3


def test_the_target_is_the_velocity():
    latents, text = torch.randn(SHAPE), torch.randn(2, 7, 8)
    ours = Objective()
    draw = ours.draw(latents, step=0)
    model = Recorder(0.5)
    losses = ours.losses(model, draw, latents, text, {})
    s = draw.sigma.view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(model.given["hidden_states"], (1 - s) * latents + s * draw.noise)
    torch.testing.assert_close(model.given["timestep"], 1000 * draw.sigma)
    torch.testing.assert_close(losses, (0.5 - draw.noise + latents).square().flatten(1).mean(1))


def test_channels_give_the_first_frame_as_the_stock_pipeline_does():
    latents, frame, clip = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(2, 5, 8)
    ours = Objective(channels=True, takes_image=True)
    draw = ours.draw(latents, step=0)
    model = Recorder()
    ours.losses(model, draw, latents, torch.zeros(2, 1, 8), {"first_frame_latent": frame, "clip_feature": clip})
    x, image = model.given["hidden_states"], model.given["encoder_hidden_states_image"]
    assert x.shape[1] == 36 and torch.equal(x[:, 20:], frame) and torch.equal(image, clip)
    assert (x[:, 16:20, 0] == 1).all() and (x[:, 16:20, 1:] == 0).all()
    with pytest.raises(KeyError, match="first_frame_latent"):
        ours.losses(model, draw, latents, torch.zeros(2, 1, 8), {})


def test_tokens_keep_the_first_frame_clean_with_timestep_0_and_without_loss():
    latents = torch.randn(64, 16, 3, 4, 6)
    ours = Objective(options=ObjectiveConfig(image_share=0.5))
    draw = ours.draw(latents, step=0)
    assert 10 < draw.conditioned.sum() < 54
    model = Recorder(0.5)
    losses = ours.losses(model, draw, latents, torch.zeros(64, 1, 1), {})
    x, t = model.given["hidden_states"], model.given["timestep"]
    assert t.shape == (64, 3 * 2 * 3)
    with_frame = draw.conditioned
    assert torch.equal(x[with_frame][:, :, 0], latents[with_frame][:, :, 0]) and (t[with_frame][:, :6] == 0).all()
    assert torch.equal(t[:, 6:], (1000 * draw.sigma)[:, None].expand(-1, 12))
    assert torch.equal(t[~with_frame][:, :6], (1000 * draw.sigma)[~with_frame][:, None].expand(-1, 6))
    error = (0.5 - draw.noise + latents).square()
    torch.testing.assert_close(losses[with_frame], error[with_frame][:, :, 1:].flatten(1).mean(1))
    torch.testing.assert_close(losses[~with_frame], error[~with_frame].flatten(1).mean(1))
