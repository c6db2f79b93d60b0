"""The user's function and modules as bytes, and Python environments that travel."""
