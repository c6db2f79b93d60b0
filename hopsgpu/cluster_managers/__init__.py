"""Reports of cluster managers, behind one interface, and their meaning for gangs and GPUs."""
