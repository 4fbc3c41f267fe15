"""The attention op alone, on random tensors: `python examples/attention.py`."""

import torch

from vmonarch import ExactBlocks, flash_entropy_attention, vmonarch_attention

T, H, W, heads, head_dim = 6, 8, 10, 4, 32
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q, k, v = (torch.randn(1, T * H * W, heads, head_dim, device=device, requires_grad=True) for _ in range(3))
full, lse_full, _ = flash_entropy_attention(q, k, v)

# The dial from VMonarch to full attention: which blocks (query frame x key frame) are attended exactly.
patterns = {
    "bare Monarch": None,
    "the paper's": "first_frame",
    "own frame": ExactBlocks(band=0),
    "neighbours": ExactBlocks(band=1),
    "all": ExactBlocks(band=T),
}
for name, exact in patterns.items():
    out, lse = vmonarch_attention(q, k, v, grid=(T, H, W), exact=exact, return_lse=True)
    error = (out - full).norm() / full.norm()
    # The log-partition of a Monarch row is that of full attention less the row's KL divergence.
    print(f"{name:12}  error {100 * error:5.1f} %  mean row-KL {(lse_full - lse).mean():.4f} nats")

out.square().mean().backward()
print(f"gradients: {', '.join(f'{t.grad.norm():.4f}' for t in (q, k, v))}")
