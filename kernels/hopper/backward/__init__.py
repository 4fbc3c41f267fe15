"""The backward kernels on Hopper: of the R-step (`monarch/r_step.py`) and of flash attention (`flash_entropy`,
`flash_bias`).

As in the portable form, one kernel owns rows (`rows.py`: dz, dq) and another owns keys (`keys.py`: dk, dv), so that
there are no atomics and every sum has one order. Both serve four cases, by the products they take part in:
    first R-steps   the key is its own value: dP = daL·kᵀ                   SUM_K
    last R-step     the value is [k | v]:     dP = daL·kᵀ + dy·vᵀ           SUM_K and SUM_V
    flash           plain attention:          dP = dO·vᵀ (dO is called dy)  SUM_V
    FlashBias       flash with a low-rank bias, and the gradients of its factors: dφq = dS·φk, dφk = dSᵀ·φq  FACTORS
A producer warp copies tiles into stages of shared memory, two warpgroups of 64 rows (or keys) each consume them. What
the program keeps (its rows or keys) and every stage have two barriers: `full` (the copies have arrived) and `empty`
(both warpgroups are done); `n` counts stages, `t` items of work.

Statistics of the rows are folded beforehand (`fold` in `common.py`): p = 2^(s·log2_scale + shift_s) and
scale·dS = p·(scale·dP + shift_dp). They are sums because a minus would cost the loop an instruction.

FACTORS and CHAINED are those of `attend.py`. `bias` is (descriptor of φq, of φk, their places in shared memory, what
their indices are times, 1 / scale): one of the two belongs to what the program keeps, the other to the stages.

Legend: B batch, S tokens, H heads, D head dim, R bias rank, m blocks, b positions per block, M rows and N keys of a
tile.
"""

from vmonarch.kernels.hopper.backward.common import TILE, fold
from vmonarch.kernels.hopper.backward.keys import keys_choice, launch_keys
from vmonarch.kernels.hopper.backward.rows import launch_rows, rows_choice

__all__ = ["TILE", "fold", "keys_choice", "launch_keys", "launch_rows", "rows_choice"]
