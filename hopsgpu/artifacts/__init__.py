"""What a run leaves on the lake: published models, checkpoints, run records and logs."""
