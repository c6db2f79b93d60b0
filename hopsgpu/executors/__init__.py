"""Runs groups of ranks on executors that arrive and leave one by one: trials, parts, worlds."""
