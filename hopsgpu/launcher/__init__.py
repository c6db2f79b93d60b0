"""A launch from its arguments to its result."""
