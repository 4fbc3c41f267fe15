"""What heads need, and plans made of it: `vmonarch calibrate`."""

# Of what a head loses, by the names that budgets and diagnoses have.
MEASURES = ("error", "layer_error", "output_error", "kl")
