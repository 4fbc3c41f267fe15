"""Measuring what every head loses, and plans made from it: `vmonarch calibrate`.

run.py samples and measures plans in place, diagnosis.py recomputes recorded calls with the candidates, and planning.py
chooses by the results. Begin with `run.calibrate`.
"""

# Measures of what a head loses, as budgets and diagnoses name them.
MEASURES = ("error", "layer_error", "output_error", "kl")
