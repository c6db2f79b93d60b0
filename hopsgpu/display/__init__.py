"""Live displays of a run, in a notebook's cell and in a terminal."""
