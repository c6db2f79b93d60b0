"""A fork server: it imports frameworks once, never computes, and forks ranks for its daemon.

The process daemon starts the server as `python -m hopsgpu.agent.fork_server DESCRIPTOR DAEMON_PID
MODULES…` with the variables that its ranks share. DESCRIPTOR is a stream socket to the daemon. The
server sends `ready` (None, or why it may not fork) and `imported` (modules). Then it receives

    spawn    forks a rank                  → id, pid | id, error
    store    forks a torch TCPStore        → id, pid, port | id, error
    signal   sends a signal to a rank

and reports each exit as `ended`. The server has one thread and no event loop, so that a child
inherits nothing that must be undone. After a rank it preforks a spare for the next (`spare_child`).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.util
import json
import os
import re
import select
import signal
import socket
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hopsgpu import linux
from hopsgpu.agent import fork_protocol, fork_safety, forked_child, spare_child
from hopsgpu.agent.json_lines import JsonLineSocket, error_fields
from hopsgpu.agent.reaper import Reaper
from hopsgpu.rank import entry as rank
from hopsgpu.rank import exit as exiting
from hopsgpu.rank import files

_COMPILER = "torch._dynamo"
# The import of the compiler counts the GPUs in some older versions of torch, but not in this one.
_HARMLESS_TORCH = (2, 15)
# Prefork only after this idle time, so that the fork does not slow the start of a rank.
_SPARE_MS = 50


class ForkServer:
    """Must run in the main thread of a single-threaded process."""

    def __init__(self, lines: JsonLineSocket, initial_state: forked_child.ServerState) -> None:
        self._lines = lines
        self._initial_state = initial_state
        self._reaper = Reaper()
        self._spare: spare_child.SpareChild | None = None
        self._needs_spare = False

    def serve(self) -> None:
        with linux.signal_descriptor([signal.SIGCHLD]) as arrived:
            poll = select.poll()
            poll.register(self._lines.connection, select.POLLIN)
            poll.register(arrived, select.POLLIN)
            while True:
                timeout = _SPARE_MS if self._needs_spare else None
                ready = {descriptor for descriptor, _ in poll.poll(timeout)}
                if not ready:
                    self._fork_spare()
                if arrived in ready:
                    os.read(arrived, 4096)
                    for status in self._reaper.reap():
                        if self._spare is not None and status.pid == self._spare.pid:
                            self._spare.close()
                            self._spare = None
                        self._lines.send(ended=asdict(status))
                    self._reaper.sweep()
                if self._lines.connection.fileno() in ready:
                    messages = self._lines.receive()
                    if messages is None:
                        return
                    for message in messages:
                        self._handle_request(message)

    def _handle_request(self, message: Mapping[str, Any]) -> None:
        match message["do"]:
            case "signal":
                self._reaper.signal(message["pid"], message["signal"], message["scope"])
            case "spawn":
                directory, environment = Path(message["directory"]), message["environment"]
                if not self._try_spare(message["id"], directory, environment):
                    prepare = functools.partial(self._become_rank, directory, environment)
                    self._fork(message["id"], prepare, functools.partial(rank.run, directory))
                self._needs_spare = True
            case "store":
                try:
                    self._fork_store(message)
                except OSError as error:
                    self._lines.send(id=message["id"], **error_fields(error))

    def _become_rank(self, directory: Path, environment: Mapping[str, str]) -> None:
        forked_child.write_to(directory / files.LOG)
        forked_child.become_rank(directory, environment, self._initial_state)

    def _fork_spare(self) -> None:
        self._needs_spare = False
        self._spare = spare_child.fork(self._begin_child, self._become_rank)
        if self._spare is not None:
            self._reaper.kept.add(self._spare.pid)

    def _try_spare(self, number: int, directory: Path, environment: Mapping[str, str]) -> bool:
        """Turn the spare into a rank; return False if there is none, or it has died."""
        spare, self._spare = self._spare, None
        if spare is None:
            return False
        try:
            problem = spare.hand_over(directory, environment)
        except OSError:
            return False
        self._reaper.kept.discard(spare.pid)
        self._reaper.add(spare.pid)
        self._answer(number, spare.pid, problem)
        return True

    def _fork_store(self, message: Mapping[str, Any]) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with socket.create_server(
            ("", 0), family=family, backlog=1024, dualstack_ipv6=dual
        ) as listener:
            port = int(listener.getsockname()[1])
            # The store closes its descriptor, which the listener would close once more.
            descriptor = os.dup(listener.fileno())
            stores: list[Any] = []

            def open_store() -> None:
                forked_child.write_to(Path(message["log"]))
                distributed = importlib.import_module("torch.distributed")
                stores.append(
                    distributed.TCPStore(
                        "127.0.0.1",
                        port,
                        message["world_size"],
                        is_master=True,
                        wait_for_workers=False,
                        master_listen_fd=descriptor,
                    )
                )

            try:
                number, keep = message["id"], [descriptor]
                self._fork(number, open_store, _wait_for_kill, keep, is_store=True, port=port)
            finally:
                os.close(descriptor)

    def _fork(
        self,
        number: int,
        prepare: Callable[[], None],
        body: Callable[[], int],
        keep: Sequence[int] = (),
        is_store: bool = False,
        **fields: Any,
    ) -> None:
        """Fork, wait until the child is set up, and report it to the daemon."""
        reading, writing = os.pipe()
        server = os.getpid()
        try:
            child = os.fork()
        except OSError as error:
            os.close(reading)
            os.close(writing)
            self._lines.send(id=number, **error_fields(error))
            return
        if child == 0:
            exiting.run_and_exit(
                functools.partial(self._run_child, server, prepare, body, [*keep, writing])
            )
        os.close(writing)
        self._reaper.add(child, is_store=is_store)
        try:
            problem = fork_protocol.read_report(reading)
        finally:
            os.close(reading)
        self._answer(number, child, problem, **fields)

    def _answer(self, number: int, child: int, problem: bytes | None, **fields: Any) -> None:
        """Report a child to the daemon; kill a child whose setup took too long.

        Args:
            problem: as returned by `fork_protocol.read_report`.
        """
        if problem is None:
            self._reaper.signal(child, signal.SIGKILL, "tree")
            late = f"the setup of the rank took more than {fork_protocol.SET_UP_SECONDS:.0f} s"
            self._lines.send(id=number, error=late, errno=None)
        elif problem:
            self._lines.send(id=number, **json.loads(problem))
        else:
            self._lines.send(id=number, pid=child, **fields)

    def _run_child(
        self, server: int, prepare: Callable[[], None], body: Callable[[], int], keep: Sequence[int]
    ) -> int:
        self._begin_child()

        def detach_and_prepare() -> None:
            forked_child.detach_child(server, keep)
            prepare()

        return fork_protocol.set_up(detach_and_prepare, body, keep[-1])

    def _begin_child(self) -> None:
        # The child reuses the descriptor's number, so the socket object must not close it.
        self._lines.connection.detach()
        if self._spare is not None:
            self._spare.detach()
        gc.enable()
        signal.set_wakeup_fd(-1)


def _wait_for_kill() -> int:
    signal.pause()
    return 0


def _import(name: str) -> None:
    """Import a module; do nothing if it is missing, because the user's function reports that."""
    if "." not in name:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
        return
    # The name may be an attribute, or a module with missing dependencies. A rank that uses torch's
    # compiler reports if that is broken.
    with contextlib.suppress(Exception if name == _COMPILER else ImportError):
        if importlib.util.find_spec(name) is not None:
            if name != _COMPILER or _is_compiler_harmless() or fork_safety.may_import(name):
                importlib.import_module(name)
            else:
                print(f"leaves the import of {name} to the ranks: it touches the GPUs, or fails")
            return
        # A lazy package (transformers) imports a module when its attribute is read.
        package, _, attribute = name.rpartition(".")
        getattr(importlib.import_module(package), attribute, None)


def _is_compiler_harmless() -> bool:
    version = importlib.import_module("torch").version
    numbers = re.match(r"(\d+)\.(\d+)", version.__version__)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= _HARMLESS_TORCH


def _disable_finalizers() -> None:
    """Prevent ranks from running this process's finalizers, which clean up its objects.

    Torch's 150 finalizers would also take 30 ms.
    """
    finalizers: Mapping[weakref.finalize[Any, Any], object]
    finalizers = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer in list(finalizers):
        finalizer.atexit = False


def main(descriptor: int, daemon: int, modules: Sequence[str]) -> None:
    linux.die_with(daemon)
    linux.reset_signals()
    linux.become_subreaper()
    initial_state = forked_child.ServerState.now()
    with socket.socket(fileno=descriptor) as connection:
        lines = JsonLineSocket(connection)
        # Every rank needs `pickling` for its call and value, and `spawn` for processes it starts.
        for name in (*modules, "hopsgpu.packaging.pickling", "multiprocessing.spawn"):
            _import(name)
        fork_safety.forget_devices(sys.modules)
        _disable_finalizers()
        gc.collect()
        # Freeze the objects: each rank's first collection would otherwise copy the shared pages.
        gc.disable()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        linux.flush_c()
        reason = fork_safety.why_unsafe(sys.modules)
        # `sys.modules[name] = None` blocks an import; skip such entries.
        loaded_modules = (name for name, module in sys.modules.items() if module is not None)
        packages = {name.partition(".")[0] for name in loaded_modules}
        lines.send(ready=reason, imported=sorted(packages))
        if reason is None:
            ForkServer(lines, initial_state).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
