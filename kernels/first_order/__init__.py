"""Attention to the first order around mean queries, for heads that attend to nearly everything alike."""
