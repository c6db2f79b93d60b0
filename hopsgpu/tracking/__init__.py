"""Logging of runs to MLflow, in addition to the lake."""
