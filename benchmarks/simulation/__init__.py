"""A simulated cluster for `benchmarks.replay`: jobs, nodes, a clock, and who gets GPUs when."""
