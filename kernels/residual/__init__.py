"""What an approximation of attention leaves out, kept by one denoising step for later ones."""
