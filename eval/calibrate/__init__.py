"""What heads need, and plans made of it: `vmonarch calibrate`.

run.py samples and measures plans in place, diagnosis.py computes the calls again; planning.py chooses by what it found.
Begin with `run.calibrate`.
"""

# Of what a head loses, by the names that budgets and diagnoses have.
MEASURES = ("error", "layer_error", "output_error", "kl")
