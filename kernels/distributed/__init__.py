"""VMonarch attention over several processes, each of which holds whole latent frames."""
