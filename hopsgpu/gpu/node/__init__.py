"""Programs that run on the nodes, without hopsgpu installed, with Python 3.6 or later."""
