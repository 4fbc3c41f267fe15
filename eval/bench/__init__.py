"""Benchmarks: `vmonarch bench`, and `vmonarch tune`.

runner.py measures any `Bench`, a record of cases and of ways to compute each: it checks results first, then times them
with machine.py's clock and makes rows.py's tables. kernels.py times attention, e2e.py whole videos, parallel.py several
GPUs and train.py training steps; tune.py finds launch options.

kernels.py and the modules of vmonarch that it imports need only torch, triton and numpy. Begin with `runner.run_bench`.
"""
