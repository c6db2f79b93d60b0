"""Launches of gangs, from the arguments to the result."""
