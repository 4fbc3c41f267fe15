"""Exact attention in sliding windows of a sequence and in neighbourhoods of a video."""
