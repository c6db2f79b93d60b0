"""The names of a rank's program, and of the files in its directory.

They have a module of their own for processes that start ranks and never become one: the program's
module imports what a rank needs, which takes longer than such a process takes to start.
"""

from __future__ import annotations

# Module of the program.
ENTRY = "hopsgpu.rank.entry"

CALL = "call.pickle"
# Once the function runs, this file is read-only, and its modification time is the start.
TAKEN = "call.taken"
VALUE = "value.pickle"
OUTCOME = "outcome.json"
LOG = "log"
WORK = "work"
TEMPORARY = "tmp"
