"""Values and pure decisions: what a launch is, which state a gang is in, whose turn it is."""
