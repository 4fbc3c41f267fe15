"""Exact attention in eight bits: int8 scores, and on Hopper fp8 weights and values. `api.py` is the front door."""
