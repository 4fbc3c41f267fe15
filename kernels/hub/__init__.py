"""What Hugging Face's `kernels` loads from the Hub: `assemble` makes it of the other folders."""
