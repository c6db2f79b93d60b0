"""The lake: runs, their checkpoints, and published models."""
