"""Interrupting a cell, as a person does in a notebook: the kernel is real, and so is YARN."""

from __future__ import annotations

import os
import queue
import re
import textwrap
from collections.abc import Callable, Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from hopsgpu.cluster_managers.manager import ClusterManager
from tests.bounds import HANG_SECONDS
from tests.conftest import gpus_become, until


@pytest.fixture
def kernel(cluster_env: dict[str, str]) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=dict(os.environ))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=HANG_SECONDS)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


class Cell:
    """What came of a cell's code: its text, and its display as it was updated."""

    def __init__(self, client: BlockingKernelClient, code: str) -> None:
        self._client = client
        self._message = client.execute(textwrap.dedent(code))
        self.text = ""
        self.error: list[str] = []
        self.pages: list[str] = []
        self.displays: set[str] = set()
        self.is_over = False

    def take(self, seconds: float) -> bool:
        """Takes in the kernel's next message; whether there was one."""
        try:
            got = self._client.get_iopub_msg(timeout=seconds)
        except queue.Empty:
            return False
        content = got["content"]
        if got["parent_header"].get("msg_id") != self._message:
            return True
        if got["msg_type"] == "stream":
            self.text += content["text"]
        elif got["msg_type"] == "error":
            self.text += f"{content['ename']}: {content['evalue']}"
            self.error = "\n".join(content["traceback"]).splitlines()
        elif got["msg_type"] in ("display_data", "update_display_data"):
            self.pages.append(content["data"]["text/html"])
            self.displays.add(content["transient"]["display_id"])
        elif got["msg_type"] == "execute_result":
            self.pages.append(content["data"].get("text/html", ""))
        elif got["msg_type"] == "status" and content["execution_state"] == "idle":
            self.is_over = True
        return True

    def rest(self) -> str:
        """The whole text, once the cell is over."""
        while not self.is_over:
            assert self.take(HANG_SECONDS), f"nothing for {HANG_SECONDS} s after {self.text}"
        return self.text


def run_cell(client: BlockingKernelClient, code: str) -> str:
    """What a cell printed, and its error."""
    return Cell(client, code).rest()


@pytest.mark.soak
def test_an_interrupted_cell_gives_back_and_ends_nothing_else(
    kernel: tuple[KernelManager, BlockingKernelClient],
    manager: ClusterManager,
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
    # Two ranks in a container, here and below.
    cell = Cell(client, "hopsgpu.launch(time.sleep, args=(600,), workers=2, placement='pack')")
    assert gpus_become(manager, 2, HANG_SECONDS)
    assert until(lambda: cell.take(1) and "running" in "".join(cell.pages[-1:]), step=0.0)
    kernels.interrupt_kernel()
    assert gpus_become(manager, 0)  # within the bound of a release
    assert "KeyboardInterrupt" in cell.rest()
    (line,) = cell.error
    assert re.fullmatch(r"KeyboardInterrupt: sleep-\S+ was cancelled, and its GPUs are back", line)
    assert "cancelled" in cell.pages[-1] and len(cell.displays) == 1
    # ETL in another thread went on, and ran once.
    said = run_cell(client, "thread.join(); print('rows', rows.value)")
    assert "rows 20" in said, said
    # The notebook's own imports, globals and functions; the same cell again.
    run_cell(client, "import math\nfactor = 3\ndef scaled(x): return math.floor(x * factor)")
    said = run_cell(
        client,
        """
        import contextlib
        from hopsgpu.launcher import arguments
        arguments.likely_imports = tuple  # imports nothing ahead
        held = contextlib.ExitStack()
        gang = held.enter_context(hopsgpu.hold(workers=2, placement="pack", progress="off"))
        """,
    )
    assert "Error" not in said, said
    again = """
        def train(x):
            context = hopsgpu.context()
            context.report(1, loss=0.5)
            print(f"<b>rank {context.rank}</b>")
            return scaled(x)
        gang.launch(train, args=(2.5,))
        """
    cells = [Cell(client, again) for _ in range(2)]
    for cell in cells:
        assert "Error" not in cell.rest(), cell.text
        shown, result = cell.pages[-2:]
        assert "succeeded" in shown and "&lt;b&gt;rank 1&lt;/b&gt;" in shown and "loss" in shown
        assert "GangResult" in result and "<td" in result and ">7<" in result
        # The ranks' lines are in the display, and the display is in its own cell.
        assert "rank 1" not in cell.text and len(cell.displays) == 1
    assert not cells[0].displays & cells[1].displays
    # What fails shows the cell's line and the error, and nothing of hopsgpu's own.
    cell = Cell(
        client,
        """
        def divides(x):
            return x / 0
        def helper():
            return gang.launch(divides, args=(1,), progress="off")
        helper()
        """,
    )
    cell.rest()
    *where, why, begin, at, source, carets, error, log = cell.error
    number = where[0].removeprefix("Cell In[").partition("]")[0]
    assert where == [
        f"Cell In[{number}], line 5",
        "    helper()",
        f"Cell In[{number}], line 4, in helper",
        '    return gang.launch(divides, args=(1,), progress="off")',
        "",
    ]
    assert re.fullmatch(r"RankFailed: rank . on \S+ \(.*\) raised ZeroDivisionError: .*", why)
    assert (begin, at, source, carets) == (
        "Traceback (most recent call last):",
        f"  Cell In[{number}], line 2, in divides",
        "    return x / 0",
        "           ~~^~~",
    )
    assert error.startswith("ZeroDivisionError: ") and log.startswith("whole log: ")
    run_cell(client, "held.close()")
    assert gpus_become(manager, 0)
    for call, kind in (
        ("hopsgpu.launch(divides, workers=0)", "ConfigError"),
        ("hopsgpu.launch(divides, args=(1,), workers=999)", "CapacityError"),
        ("with hopsgpu.hold(workers=4, acquire_timeout=0.1, progress='off'): pass", "GangTimeout"),
        ("run = hopsgpu.submit(divides, args=(1,)); run.cancel(); run.result()", "Cancelled"),
    ):
        cell = Cell(client, call)
        cell.rest()
        place, line, empty, said = cell.error
        assert (line, empty) == (f"    {call}", "") and place.endswith("line 1")
        assert said.startswith(f"{kind}: ")
