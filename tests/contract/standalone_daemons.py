"""Real standalone Masters and Workers from PySpark's jars, on the loopback addresses."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from hopsgpu.cluster_managers.standalone.manager import StandaloneManager
from tests.bounds import HANG_SECONDS

SPARK = Path(pyspark.__file__).parent
_DEPLOY = "org.apache.spark.deploy"
_ZOOKEEPER = "org.apache.zookeeper.server.ZooKeeperServerMain"
GPUS_PER_WORKER = 2


def write_discovery(directory: Path) -> Path:
    """Write Spark's discovery script of a node with two simulated GPUs."""
    script = directory / "discovery.sh"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1"]}\'\n')
    script.chmod(0o755)
    return script


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Standalone:
    """Daemons in a directory, and how clients find the Masters.

    Attributes:
        masters: RPC port and web port of each Master.
        workers: process of each Worker, by its host.
    """

    directory: Path
    masters: list[tuple[int, int]] = field(default_factory=list)
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"spark://{','.join(f'127.0.0.1:{rpc}' for rpc, _ in self.masters)}"

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{web}" for _, web in self.masters)

    def manager(self, token_file: Path | None = None) -> StandaloneManager:
        return StandaloneManager(self.url, self.addresses, token_file=token_file)

    def start_master(self, properties: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        rpc, web = free_port(), free_port()
        self.masters.append((rpc, web))
        conf = self._write(f"master-{rpc}.conf", properties or {})
        return self._start(
            f"{_DEPLOY}.master.Master",
            *("--host", "127.0.0.1", "--port", str(rpc), "--webui-port", str(web)),
            *("--properties-file", str(conf)),
        )

    def start_worker(self, host: str, port: int = 0) -> None:
        script = write_discovery(self.directory)
        gpus = {"amount": str(GPUS_PER_WORKER), "discoveryScript": str(script)}
        resource = {f"spark.worker.resource.gpu.{name}": value for name, value in gpus.items()}
        conf = self._write("worker.conf", resource)
        self.workers[host] = self._start(
            f"{_DEPLOY}.worker.Worker",
            *("--host", host, "--port", str(port), "--webui-port", "0"),
            *("--cores", "4", "--memory", "4g", "--work-dir", str(self.directory / host)),
            *("--properties-file", str(conf), self.url),
        )

    def start_zookeeper(self) -> str:
        """Start ZooKeeper; return the value of `spark.deploy.zookeeper.url`."""
        port = free_port()
        data = self.directory / "zookeeper"
        self._start(_ZOOKEEPER, str(port), str(data))
        return f"127.0.0.1:{port}"

    def _write(self, name: str, properties: Mapping[str, str]) -> Path:
        file = self.directory / name
        file.write_text("".join(f"{key} {value}\n" for key, value in properties.items()))
        return file

    def _start(self, main_class: str, *arguments: str) -> subprocess.Popen[bytes]:
        environ = {
            **{name: v for name, v in os.environ.items() if not name.startswith("SPARK_")},
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        number = len(self.processes)
        with (self.directory / f"daemon-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(SPARK / "bin" / "spark-class"), main_class, *arguments],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process


@contextlib.contextmanager
def standalone(directory: Path) -> Iterator[Standalone]:
    """Give a cluster without daemons; end the processes of those that are started."""
    cluster = Standalone(directory)
    try:
        yield cluster
    finally:
        for process in cluster.processes:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a daemon with its children, which are executors, as the loss of its machine would."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(HANG_SECONDS)
