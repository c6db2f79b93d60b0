"""All rows of the fault matrix, in their order."""

from __future__ import annotations

from tests.faults.faults import COMMON_FAULTS
from tests.faults.kubernetes_faults import KUBERNETES_FAULTS

FAULTS = (*COMMON_FAULTS, *KUBERNETES_FAULTS)
