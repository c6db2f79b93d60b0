"""The GPUs of a Worker of a Spark standalone cluster: the script that lists them.

`spark-scripts/worker-gpus` is this module and its imports in one file (see
`hopsgpu.gpu.script_archive`), for `spark.worker.resource.gpu.discoveryScript`. The Master hands
these addresses out to executors. They are UUIDs, as those of `discovery_script`: CUDA knows a UUID
also where it sees other GPUs than the Worker.
"""

import json
import sys

from hopsgpu.gpu.node.devices import DriverError, ask_driver


def main() -> int:
    """Print the node's GPUs as Spark reads them, or write to stderr why there are none."""
    try:
        devices = ask_driver().devices
    except (DriverError, OSError) as error:
        return _fail(str(error))
    # A GPU that does not answer has no UUID.
    addresses = [device.address for device in devices if not device.address.startswith("PCI-")]
    if not addresses:
        lost = [f"{device.address}: {device.verdict.reason}" for device in devices]
        return _fail("; ".join(lost) or "the driver lists no GPU on this node")
    print(json.dumps({"name": "gpu", "addresses": addresses}))
    return 0


def _fail(reason: str) -> int:
    print(
        f"hopsgpu worker-gpus: {reason}; without a GPU, leave out the spark.worker.resource.gpu"
        " properties of this Worker",
        file=sys.stderr,
    )
    return 1
