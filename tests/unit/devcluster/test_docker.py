from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest

from hopsgpu.devcluster.docker import check_docker, is_listening, node_site, write_files
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.errors import ClusterError

RO, RW = "docker.allowed.ro-mounts", "docker.allowed.rw-mounts"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs of Docker that the machine has; root runs this process."""
    found = ["containerd", "dockerd", "docker", "runc"]

    def which(name: str, path: str | None = None) -> str | None:
        return f"/usr/bin/{name}" if name in found else None

    monkeypatch.setattr(shutil, "which", which)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return found


def test_without_root_or_packages_it_says_what_is_missing(
    programs: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    layout = ClusterLayout.at("/c")
    check_docker(layout)
    programs.remove("runc")
    with pytest.raises(ClusterError, match=r"needs runc.*apt install docker\.io"):
        check_docker(layout)
    programs.append("runc")
    with pytest.raises(ClusterError, match="107 bytes.*use a shorter --dir"):
        check_docker(ClusterLayout(Path("/" + "d" * 100)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"):
        check_docker(layout)


def test_users_requests_are_allowed_besides_the_mounts_of_every_container(
    programs: list[str], tmp_path: Path
) -> None:
    layout = ClusterLayout.at(tmp_path)
    allowed = {RO: "/data", "docker.trusted.registries": "registry.company"}
    write_files(layout, ["/usr/lib/jvm"], allowed)
    lines = (tmp_path / "conf" / "container-executor.cfg").read_text().splitlines()
    cfg = dict(line.split("=", 1) for line in lines)
    assert cfg[RO] == "/sys/fs/cgroup,/usr/lib/jvm,/data"
    assert cfg[RW] == str(tmp_path.resolve() / "nodes")
    assert cfg["docker.trusted.registries"] == "registry.company"
    assert os.access(layout.container_executor, os.X_OK)
    site = node_site(layout, ["/usr/lib/jvm"])
    assert site["yarn.nodemanager.linux-container-executor.path"] == str(layout.container_executor)
    mounts = site["yarn.nodemanager.runtime.linux.docker.default-ro-mounts"]
    assert mounts == "/usr/lib/jvm:/usr/lib/jvm"


def test_a_socket_is_listening_once_a_daemon_has_bound_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert not is_listening(path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert not is_listening(path)
        server.listen()
        assert is_listening(path)
    assert not is_listening(path)
