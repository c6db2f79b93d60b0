"""A node of a cluster on Kubernetes: containerd, the kubelet, and the plugin of simulated GPUs.

A node has a network namespace, a mount namespace, a PID namespace and a control group of its own.
All its processes and mounts end with its first process. That process starts the kubelet and the
plugin again after their end, as systemd does on other machines. The kubelet requires a few kernel
settings, and reads the size of the node from files. Other files are mounted over them here, so that
the machine's stay as they are.
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
from typing import NoReturn

_SETTINGS = {"vm/overcommit_memory": "1", "kernel/panic": "10", "kernel/panic_on_oops": "1"}
_POLL_SECONDS = 0.1
_SOCKET_SECONDS = 600.0
_COMMAND_SECONDS = 600.0
_END_SECONDS = 2.0
# A daemon that ends sooner after its start has a wrong configuration: another start is no help.
_MIN_RUN_SECONDS = 5.0


@dataclass(frozen=True)
class NodeSpec:
    """The programs of a node, and their directories.

    Attributes:
        home: directory of the node's state.
        logs: directory of the daemons' logs.
        control_group: name of the control group of all processes of pods, below the machine's.
        cores, memory_mib: the size that the kubelet reports.
        containerd, ctr, plugin, kubelet: the commands.
        socket: containerd's socket.
        images: archives of images, as `docker save` writes them.
    """

    home: str
    logs: str
    control_group: str
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


def enter(file: str) -> NoReturn:
    """Become a process in the node's control group, as a namespace's first group; run the node."""
    spec = _read(file)
    _join_control_group(spec.control_group)
    command = ["unshare", "--cgroup", *command_of("run", file)]
    os.execvp(command[0], command)


def command_of(function: str, file: str) -> list[str]:
    """Return the command that calls a function of this module with a file of a `NodeSpec`."""
    # The environment of daemons has no PYTHONPATH, which may name the caller's hopsgpu.
    path = f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})"
    call = f"from {__name__} import {function}; sys.exit({function}(sys.argv[1]))"
    return [sys.executable, "-P", "-c", f"import sys; {path}; {call}", file]


def _read(file: str) -> NodeSpec:
    return NodeSpec(**json.loads(Path(file).read_text(encoding="utf-8")))


def run(file: str) -> int:
    """Run a node until containerd ends, another daemon cannot run, or a signal arrives.

    Returns:
        The exit code.
    """
    spec = _read(file)
    # As the first process of its PID namespace, this one gets only signals that it handles.
    signal.signal(signal.SIGTERM, _exit)
    _mount_private_directories(Path(spec.home))
    _mount_control_groups()
    _show_settings(Path(spec.home), spec.cores, spec.memory_mib)
    with contextlib.ExitStack() as stack:
        containerd = stack.enter_context(_running(spec, "containerd", spec.containerd))
        _await_socket(Path(spec.socket), containerd)
        for image in spec.images:
            command = [*spec.ctr, "images", "import", image]
            subprocess.run(command, timeout=_COMMAND_SECONDS, check=True)
        daemons = (("kubelet", spec.kubelet), ("plugin", spec.plugin))
        services = [_Service(spec, name, command, stack) for name, command in daemons if command]
        while containerd.poll() is None and all(service.keep_running() for service in services):
            _reap_orphans({containerd.pid, *(service.pid for service in services)})
            time.sleep(_POLL_SECONDS)
        print("a daemon of the node has ended; its log says why", flush=True)
    return 1


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _reap_orphans(daemons: set[int]) -> None:
    """Reap ended processes that this one adopted, such as the shims of containers."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in daemons:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


class _Service:
    """A daemon that is started again after its end.

    Args:
        stack: stops the daemon in the end.
    """

    def __init__(
        self, spec: NodeSpec, name: str, command: list[str], stack: contextlib.ExitStack
    ) -> None:
        self._spec, self._name, self._command = spec, name, command
        self._stack = stack.enter_context(contextlib.ExitStack())
        self._run()

    @property
    def pid(self) -> int:
        return self._process.pid

    def keep_running(self) -> bool:
        """Start the daemon again if it has ended; return False if it ended soon after its start."""
        if self._process.poll() is None:
            return True
        print(f"the {self._name} has ended; exit code {self._process.returncode}", flush=True)
        if time.monotonic() - self._started < _MIN_RUN_SECONDS:
            return False
        self._stack.close()
        self._run()
        return True

    def _run(self) -> None:
        self._started = time.monotonic()
        running = _running(self._spec, self._name, self._command)
        self._process = self._stack.enter_context(running)


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
    _run("mount", *map(str, arguments))


def _run(*command: str) -> None:
    subprocess.run(command, timeout=_COMMAND_SECONDS, check=True)


def _mount_private_directories(home: Path) -> None:
    """Give the node directories of its own where its daemons use fixed paths."""
    _mount("-t", "tmpfs", "tmpfs", "/run")
    for path in ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods"):
        private = home / path.removeprefix("/var/").replace("/", "-")
        private.mkdir(parents=True, exist_ok=True)
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount("--bind", private, path)


def _control_group_mounts() -> list[tuple[str, str, str]]:
    """Return type, place and options of each mounted hierarchy of control groups."""
    lines = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    fields = [line.split() for line in lines]
    return [(kind, place, options) for _, place, kind, options, *_ in fields if "cgroup" in kind]


def _join_control_group(name: str) -> None:
    """Move this process into a control group, in each hierarchy; create it before."""
    for _, place, _ in _control_group_mounts():
        group = Path(place)
        for part in name.split("/"):
            parent, group = group, group / part
            group.mkdir(exist_ok=True)
            # A new group of this controller has no cores, and takes no processes.
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (parent / file).exists():
                    (group / file).write_text((parent / file).read_text())
        (group / "cgroup.procs").write_text("0")


def _mount_control_groups() -> None:
    """Show the node its own control group as the first one, so that its pods are all below."""
    for kind, place, options in _control_group_mounts():
        _run("umount", "--lazy", place)
        controllers = [o for o in options.split(",") if o not in ("rw", "ro", "relatime")]
        chosen = ("-o", ",".join(controllers)) if kind == "cgroup" else ()
        _mount("-t", kind, *chosen, kind, place)


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
