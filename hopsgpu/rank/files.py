"""The names of a rank's program, and of the files in its directory.

The module is separate from the program, whose imports would slow processes that only start ranks.
"""

from __future__ import annotations

# Module of the program.
ENTRY = "hopsgpu.rank.entry"

CALL = "call.pickle"
# The function's start makes this file read-only, and sets its modification time.
TAKEN = "call.taken"
VALUE = "value.pickle"
OUTCOME = "outcome.json"
LOG = "log"
WORK = "work"
TEMPORARY = "tmp"
