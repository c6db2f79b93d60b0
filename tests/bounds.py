"""How long tests wait."""

from __future__ import annotations

# Only ends a test that hangs: on a machine ten times slower than this one, nothing takes as long.
HANG_SECONDS = 2700.0
