"""Files to an object store and back."""

from __future__ import annotations

from tests.contract import test_transfer
from tests.objects.contracts import contracts_of

# It counts the clients of other lakes; a directory takes no file's name there.
WITHOUT = ("test_files_are_read_through_one_client", "test_the_first_problem_ends_the_others")
globals().update(contracts_of(test_transfer, WITHOUT))
