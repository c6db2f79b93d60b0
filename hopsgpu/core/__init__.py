"""Values and pure decisions: what a launch is, how a gang stands, whose turn it is."""
