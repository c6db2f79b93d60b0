"""A node of a cluster on Kubernetes: containerd, the kubelet, and the plugin of simulated GPUs.

`python -m hopsgpu.devcluster.kubernetes_node FILE` runs in a network namespace, a mount namespace
and a PID namespace of its own, so that all processes and mounts of the node end with it. The
kubelet requires a few kernel settings, and reads the size of the node from files. Other files are
mounted over them here, so that the machine's stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
_POLL_SECONDS = 0.1
_SOCKET_SECONDS = 600.0
_COMMAND_SECONDS = 600.0
_END_SECONDS = 2.0


@dataclass(frozen=True)
class NodeSpec:
    """What a node runs.

    Attributes:
        home: directory of the node's state.
        logs: directory of the daemons' logs.
        cores, memory_mib: the size that the kubelet reports.
        containerd, ctr, plugin, kubelet: the commands.
        socket: containerd's socket.
        images: archives of images, as `docker save` writes them.
    """

    home: str
    logs: str
    cores: int
    memory_mib: int
    containerd: list[str]
    ctr: list[str]
    plugin: list[str]
    kubelet: list[str]
    socket: str
    images: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def main(file: str) -> int:
    """Run a node until one of its daemons ends, or a signal arrives; return the exit code."""
    spec = NodeSpec(**json.loads(Path(file).read_text(encoding="utf-8")))
    # As the first process of its PID namespace, this one gets only signals that it handles.
    signal.signal(signal.SIGTERM, _exit)
    _mount_private_directories(Path(spec.home))
    _show_settings(Path(spec.home), spec.cores, spec.memory_mib)
    with contextlib.ExitStack() as stack:
        containerd = stack.enter_context(_running(spec, "containerd", spec.containerd))
        _await_socket(Path(spec.socket), containerd)
        for image in spec.images:
            command = [*spec.ctr, "images", "import", image]
            subprocess.run(command, timeout=_COMMAND_SECONDS, check=True)
        daemons = [containerd]
        for name, command in (("kubelet", spec.kubelet), ("plugin", spec.plugin)):
            if command:
                daemons.append(stack.enter_context(_running(spec, name, command)))
        while all(daemon.poll() is None for daemon in daemons):
            _reap_orphans({daemon.pid for daemon in daemons})
            time.sleep(_POLL_SECONDS)
        codes = ", ".join(str(daemon.poll()) for daemon in daemons)
        print(f"a daemon of the node has ended; exit codes: {codes}", flush=True)
    return 1


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _reap_orphans(own: set[int]) -> None:
    """Reap ended processes that this one adopted, such as the shims of containers."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


@contextlib.contextmanager
def _running(spec: NodeSpec, name: str, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    home = Path(spec.home)
    with (Path(spec.logs) / f"{home.name}-{name}.log").open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        process.kill()


def _await_socket(socket: Path, daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _SOCKET_SECONDS
    while not socket.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"containerd does not listen on {socket}")
        time.sleep(_POLL_SECONDS)


def _mount(*arguments: str | Path) -> None:
    command = ["mount", *map(str, arguments)]
    subprocess.run(command, timeout=_COMMAND_SECONDS, check=True)


def _mount_private_directories(home: Path) -> None:
    """Give the node directories of its own where its daemons use fixed paths."""
    _mount("-t", "tmpfs", "tmpfs", "/run")
    for path in ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods"):
        own = home / path.removeprefix("/var/").replace("/", "-")
        own.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount("--bind", own, path)


def _show_settings(home: Path, cores: int, memory_mib: int) -> None:
    """Show the kubelet the kernel settings that it requires, and the size of the node."""
    shown = home / "shown"
    info = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    first = info.split("\n\n", 1)[0].splitlines()
    blocks = ("\n".join(_of_core(line, core) for line in first) for core in range(cores))
    memory = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[1:]
    total = f"MemTotal: {memory_mib * 1024} kB"
    files: Mapping[str, str] = {
        **{f"/proc/sys/{name}": value for name, value in _SETTINGS.items()},
        "/proc/cpuinfo": "\n\n".join(blocks) + "\n",
        "/proc/meminfo": "\n".join([total, *memory]),
    }
    for path, text in files.items():
        file = shown / path.strip("/").replace("/", "-")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n", encoding="ascii")
        _mount("--bind", file, path)
    devices = shown / "cpu"
    for core in range(cores):
        topology = devices / f"cpu{core}" / "topology"
        topology.mkdir(parents=True, exist_ok=True)
        (topology / "core_id").write_text(f"{core}\n", encoding="ascii")
        (topology / "physical_package_id").write_text("0\n", encoding="ascii")
    for name in ("online", "possible", "present"):
        (devices / name).write_text(f"0-{cores - 1}\n", encoding="ascii")
    _mount("--bind", devices, "/sys/devices/system/cpu")
    # Without this directory, the kubelet counts the cores in the other one.
    if Path("/sys/devices/system/node").is_dir():
        _mount("-t", "tmpfs", "tmpfs", "/sys/devices/system/node")


def _of_core(line: str, core: int) -> str:
    name = line.partition(":")[0].strip()
    values = {"processor": core, "core id": core, "apicid": core, "cpu cores": 1}
    return f"{name}\t: {values[name]}" if name in values else line


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
