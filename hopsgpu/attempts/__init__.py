"""Starts all ranks of a gang once, follows them to their end, and concludes why they failed."""
