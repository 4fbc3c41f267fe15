"""Benchmarks: `vmonarch bench`, and `vmonarch tune`.

runner.py measures any `Bench`, a record of cases and of ways to compute each: the gate, then machine.py's clock and
rows.py's tables. kernels.py has attention, e2e.py videos, parallel.py those of several GPUs, train.py training steps;
tune.py finds launch options.

Of vmonarch, kernels.py and what it imports need torch, triton and numpy alone. Begin with `runner.run_bench`.
"""
