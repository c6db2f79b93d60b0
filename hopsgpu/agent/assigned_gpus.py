"""Leases the GPUs that a standalone master assigned to this executor, until the executor ends.

`python -m hopsgpu.agent.assigned_gpus ADDRESS…` does what the discovery script does on YARN, but
for GPUs that are chosen already.
"""

from __future__ import annotations

import sys

from hopsgpu.gpu.node.discovery_script import main

if __name__ == "__main__":
    sys.exit(main(len(sys.argv) - 1, assigned=sys.argv[1:]))
