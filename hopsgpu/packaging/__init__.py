"""Pickling of the user's function, packing of modules, and Python environments for the ranks."""
