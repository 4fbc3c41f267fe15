"""The errors of heads, and plans made from them: `vmonarch calibrate`.

run.py samples and measures plans in place, diagnosis.py computes the calls again; planning.py chooses by what it found.
Begin with `run.calibrate`.
"""

# Measures of a head's error, by their names in budgets and diagnoses.
MEASURES = ("error", "layer_error", "output_error", "kl")
