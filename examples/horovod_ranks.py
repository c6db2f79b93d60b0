"""Horovod on gloo, with PyTorch, on a gang.

Not tested: there is no wheel of Horovod 0.28.1 for the Pythons that hopsgpu runs on. Written
according to its documentation and to `horovod.runner.gloo_run`.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/horovod_ranks.py
"""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import Any

import hopsgpu

WORKERS = 2
BATCH = 32
PATIENCE = 60.0


def rendezvous() -> None:
    """Do what horovodrun does before its ranks start: rank 0 serves, the others wait for it.

    All variables of Horovod are set; the port is held for rank 0.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    address = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    port = int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    if os.environ["HOROVOD_RANK"] == "0":
        each = os.environ["HOROVOD_LOCAL_SIZE"]
        containers = range(int(os.environ["HOROVOD_CROSS_SIZE"]))
        hosts = parse_hosts(",".join(f"container-{n}:{each}" for n in containers))
        server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
        server.init(get_host_assignments(hosts, int(os.environ["HOROVOD_SIZE"])))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection((address, port), PATIENCE).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def train(steps: int) -> dict[str, Any]:
    """Fit a plane; every rank computes on its part of each batch."""
    import horovod.torch as hvd
    import torch

    rendezvous()
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", hvd.local_rank())
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plane = torch.tensor([[1.0], [-2.0], [3.0]])
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, 3)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x.to(device)), (x @ plane).to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    hvd.shutdown()
    return {"losses": losses, "weights": model.weight.flatten().tolist()}


def main() -> None:
    spark = hopsgpu.session("horovod-ranks")
    result = hopsgpu.launch(train, kwargs={"steps": 50}, workers=WORKERS)
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")
    print(f"plane {result.value['weights']}")


if __name__ == "__main__":
    main()
