"""Scoring: a table read, predicted and written in parts, on executors that come and go."""
