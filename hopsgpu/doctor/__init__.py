"""Checks of a cluster and a session; each says how to fix a problem.

`facts`, `node_probe` and `probe_gang` gather facts. The checks, in the other modules, are pure
functions of the facts.
"""
