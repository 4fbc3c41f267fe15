"""FlashBias: softmax attention with a bias that is the product of two thin factors."""
