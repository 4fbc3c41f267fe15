"""`vmonarch generate` in a process on a CPU, which diffusers takes for an accelerator with one device.

At the end it prints how many tokens the transformers' blocks were given.
"""

import sys

from context_parallel_worker import stand_for_accelerators
from diffusers.models.transformers.transformer_wan import WanTransformerBlock

from vmonarch.cli import main

stand_for_accelerators()
tokens = set()
forward = WanTransformerBlock.forward


def noted(self, hidden_states, *args, **kwargs):
    tokens.add(hidden_states.shape[1])
    return forward(self, hidden_states, *args, **kwargs)


WanTransformerBlock.forward = noted
code = main(sys.argv[1:])
sys.stderr.write(f"tokens of a block: {sorted(tokens)}\n")
sys.exit(code)
