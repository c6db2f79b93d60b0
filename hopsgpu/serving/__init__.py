"""Signatures and formats of models, and what servers need for them."""
