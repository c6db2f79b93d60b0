"""GPU time of runs whose records are on an object store."""

from __future__ import annotations

from tests.contract import test_usage
from tests.objects.contracts import contracts_of

# A directory has no time there.
WITHOUT = ("test_a_directory_changes_with_its_record",)
globals().update(contracts_of(test_usage, WITHOUT))
