"""The version of hopsgpu."""

__version__ = "0.1.0"
