"""What heads need, and plans made of it: `vmonarch calibrate`.

run.py samples, diagnosis.py computes the calls again; planning.py chooses by what it found, refining.py measures plans
in place. Begin with `run.calibrate`.
"""

# Of what a head loses, by the names that budgets and diagnoses have.
MEASURES = ("error", "layer_error", "output_error", "kl")
