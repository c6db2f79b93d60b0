"""Files that an export copies beside a model; they run in servers that have no hopsgpu."""
