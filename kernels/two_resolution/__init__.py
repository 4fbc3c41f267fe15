"""Attention in two resolutions: the best key tiles exactly, the mean of every other one, in one softmax."""
