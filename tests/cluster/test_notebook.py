"""Interrupting a cell, as a person does in a notebook: the kernel is real, and so is YARN."""

from __future__ import annotations

import os
import queue
import textwrap
from collections.abc import Callable, Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from hopsgpu.yarn.resource_manager import ResourceManager
from tests.conftest import gpus_become, until

CELL_SECONDS = 120


@pytest.fixture
def kernel(cluster_env: dict[str, str]) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(client: BlockingKernelClient, code: str) -> str:
    """What a cell printed, and its error."""
    message = client.execute(textwrap.dedent(code))
    return rest_of_cell(client, message)


def rest_of_cell(client: BlockingKernelClient, message: str) -> str:
    said = []
    while True:
        got = client.get_iopub_msg(timeout=CELL_SECONDS)
        if got["parent_header"].get("msg_id") != message:
            continue
        content = got["content"]
        if got["msg_type"] == "stream":
            said.append(content["text"])
        elif got["msg_type"] == "error":
            said.append(f"{content['ename']}: {content['evalue']}")
        elif got["msg_type"] == "status" and content["execution_state"] == "idle":
            return "".join(said)


def test_an_interrupted_cell_gives_back_and_ends_nothing_else(
    kernel: tuple[KernelManager, BlockingKernelClient],
    manager: ResourceManager,
    gpus_back: Callable[[], int],
) -> None:
    kernels, client = kernel
    said = run_cell(
        client,
        """
        import threading, time
        import hopsgpu
        spark = hopsgpu.session("notebook")
        rows = spark.sparkContext.accumulator(0)
        def slowly(number):
            time.sleep(2)
            rows.add(1)
        def etl():
            for _ in range(5):
                spark.sparkContext.parallelize(range(4), 4).foreach(slowly)
        thread = threading.Thread(target=etl)
        thread.start()
        print("ready")
        """,
    )
    assert "ready" in said, said
    message = client.execute("hopsgpu.launch(time.sleep, args=(600,), workers=2)")
    assert gpus_become(manager, 2, 60)
    shown: list[str] = []

    def trains() -> bool:
        try:
            shown.append(str(client.get_iopub_msg(timeout=1)["content"].get("text", "")))
        except queue.Empty:
            return False
        return "training" in shown[-1]

    assert until(trains, 60, 0.0), shown
    kernels.interrupt_kernel()
    assert gpus_become(manager, 0, 15)
    assert "KeyboardInterrupt" in rest_of_cell(client, message)
    # ETL in another thread went on, and ran once.
    said = run_cell(client, "thread.join(); print('rows', rows.value)")
    assert "rows 20" in said, said
    said = run_cell(client, "print('again', hopsgpu.launch(lambda: 7, progress='off').value)")
    assert "again 7" in said, said
