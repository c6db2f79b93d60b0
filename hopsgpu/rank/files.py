"""The names of a rank's program, and of the files in its directory.

This module is separate for processes that start ranks and never become one. The imports of the
program's module would take longer than the rest of such a process's start.
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
