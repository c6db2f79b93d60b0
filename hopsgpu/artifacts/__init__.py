"""Files of a run on the lake: published models, checkpoints, run records and logs."""
