"""Flash-Entropy-Attention: softmax attention that also yields the entropy of every row."""
