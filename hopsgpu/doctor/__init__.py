"""Checks a cluster and a session, and says what mends what is wrong.

Facts are gathered in `gather`, `node` and `trial`; the checks themselves, in the other modules,
are pure functions of them.
"""
