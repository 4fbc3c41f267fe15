"""What the embedded model learns: its small `AutoencoderKLWan`, and its text encoder and transformer together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from torch import nn
from transformers import UMT5EncoderModel

from vmonarch.finetune.scenes import OBJECT_TABLES, SCENE_TABLES, SceneBatch

KL_WEIGHT = 2e-5
TEXT_LENGTH = 512
"""Rows of prompt embedding the stock Wan pipeline gives the transformer; rows past the prompt's tokens are zero."""
CAPTION_DROPOUT, UNIFORM_SHARE, ATTRIBUTE_WEIGHT = 0.1, 0.1, 0.05


class Reconstruction(nn.Module):
    """What the VAE learns: L1 + 2·MSE + 2e-5·KL on whole clips."""

    def __init__(self, vae: AutoencoderKLWan) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, video: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scalars by name, `loss` among them, of clips [B, 3, 1 + 4n, Y, X] in [-1, 1]."""
        posterior = self.vae.encode(video).latent_dist
        difference = self.vae.decode(posterior.sample()).sample.float() - video
        l1, mse = difference.abs().mean(), difference.square().mean()
        mean, log_variance = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        psnr = -10 * torch.log10((mse.detach() / 4).clamp(min=1e-12))
        return {"loss": l1 + 2 * mse + KL_WEIGHT * kl, "l1": l1, "psnr": psnr, "kl": kl}


def attribute_targets(scenes: SceneBatch) -> torch.Tensor:
    """Classes of a scene's attributes, [B, 13]; an absent second object has a class of its own."""
    of_objects = [
        torch.where(scenes.count > slot, getattr(scenes, name)[:, slot], len(table))
        for slot in range(2)
        for name, table in OBJECT_TABLES.items()
    ]
    return torch.stack([*of_objects, *(getattr(scenes, name) for name in SCENE_TABLES)], 1)


class AttributeHeads(nn.Module):
    """A training aid that is not shipped: it reads every attribute of the scene back from the pooled text."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.sizes = [len(table) + 1 for table in OBJECT_TABLES.values()] * 2 + [len(t) for t in SCENE_TABLES.values()]
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, sum(self.sizes)))

    def forward(self, pooled: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of each text [B]; pooled [B, D], targets [B, A]."""
        pairs = zip(self.layers(pooled).float().split(self.sizes, dim=-1), targets.T, strict=True)
        return torch.stack([F.cross_entropy(logits, target, reduction="none") for logits, target in pairs]).mean(0)


class TextToVideo(nn.Module):
    """What text encoder and transformer learn: flow matching as Wan's, and the attributes from the text.

    Args:
        text_encoder, transformer: trained in place.
        flow_shift: moves the noise levels towards noise.
        batch: clips that are drawn at a time.
    """

    def __init__(self, text_encoder: UMT5EncoderModel, transformer: nn.Module, flow_shift: float, batch: int) -> None:
        super().__init__()
        self.text_encoder, self.transformer = text_encoder, transformer
        self.heads = AttributeHeads(text_encoder.config.d_model)
        self.flow_shift, self.batch = flow_shift, batch

    def encode(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token numbers [B, L] as the stock pipeline encodes them.

        Returns:
            embeddings [B, 512, D], zero past each text's tokens, and the mean over each text's tokens [B, D].
        """
        mask = ids != 0
        hidden = self.text_encoder(ids, mask.long()).last_hidden_state * mask[..., None]
        pooled = hidden.sum(1) / mask.sum(1, keepdim=True)
        return F.pad(hidden, (0, 0, 0, TEXT_LENGTH - ids.shape[1])), pooled

    def draw_sigma(self, batch: int, device: torch.device) -> torch.Tensor:
        """Noise levels [B] in (0, 1]: logit-normal, a tenth of them uniform, then shifted towards noise as Wan's."""
        uniform = torch.rand(batch, device=device) < UNIFORM_SHARE
        normal = torch.randn(batch, device=device)
        u = torch.where(uniform, torch.rand(batch, device=device), normal.sigmoid())
        return (self.flow_shift * u / (1 + (self.flow_shift - 1) * u)).clamp(1e-4, 1.0)

    def forward(self, latents: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scalars by name, `loss` among them, of clips that are drawn from all, each with one of its captions or none.

        Args:
            latents: normalised, [N, C, F, Y, X]. tokens: [N, K, L], of K captions of each clip.
            targets: [N, A], see `attribute_targets`.
        """
        batch, device = self.batch, latents.device
        rows = torch.randint(len(latents), (batch,), device=device)
        clean = latents[rows].float()
        ids = tokens[rows, torch.randint(tokens.shape[1], (batch,), device=device)]
        dropped = torch.rand(batch, device=device) < CAPTION_DROPOUT
        empty = F.one_hot(torch.zeros_like(rows), ids.shape[1])  # the token that ends a text, and padding
        ids = torch.where(dropped[:, None], empty, ids)
        text, pooled = self.encode(ids)
        sigma, noise = self.draw_sigma(batch, device), torch.randn_like(clean)
        s = sigma.view(-1, 1, 1, 1, 1)
        velocity = self.transformer(
            hidden_states=(1 - s) * clean + s * noise,
            timestep=1000 * sigma,
            encoder_hidden_states=text.float(),
            return_dict=False,
        )[0]
        flow = (velocity.float() - (noise - clean)).square().mean()
        attributes = self.heads(pooled, targets[rows])
        loss = flow + ATTRIBUTE_WEIGHT * (attributes * ~dropped).mean()
        return {"loss": loss, "flow": flow, "text": attributes.mean()}
