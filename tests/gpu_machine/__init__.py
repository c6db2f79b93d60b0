"""Checks of hopsgpu on a machine with a real NVIDIA GPU: `make gpu`."""
