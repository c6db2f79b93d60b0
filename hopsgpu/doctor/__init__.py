"""Checks of a cluster and a session, which say how to fix what is wrong.

`facts`, `node_probe` and `probe_gang` gather facts; the checks, in the other modules, are pure
functions of them.
"""
