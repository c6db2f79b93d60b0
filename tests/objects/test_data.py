"""A rank's data on an object store."""

from __future__ import annotations

from tests.contract import test_data
from tests.objects.contracts import contracts_of

globals().update(contracts_of(test_data, ()))
