"""The lake: the run's directory and published models, on fsspec file systems."""
