"""Training: finetuning of video diffusion transformers and the embedded model."""
