"""The programs of a cluster on Kubernetes: where they are, and which ones are missing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from hopsgpu.devcluster import kubernetes_programs
from hopsgpu.devcluster.kubernetes_programs import VERSION, built_programs, find_programs
from hopsgpu.errors import ClusterError

OF_KUBERNETES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "gpu-device-plugin",
    "hopsgpu-pause",
    "kubectl",
)


@dataclass
class Machine:
    """The directories of a machine with all programs.

    Attributes:
        system: programs of the distribution's packages.
        cni: plugins for networks of pods.
        built: what `make kubernetes` has built.
    """

    system: Path
    cni: Path
    built: Path
    environ: dict[str, str]


def add_program(directory: Path, name: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text("#!/bin/sh\n")
    (directory / name).chmod(0o755)
    return directory / name


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    environ = {"HOME": str(tmp_path), "PATH": str(tmp_path / "path")}
    simulated = Machine(tmp_path / "system", tmp_path / "cni", built_programs(environ), environ)
    for name in kubernetes_programs._SYSTEM:
        add_program(simulated.system, name)
    add_program(simulated.cni, "bridge")
    for name in OF_KUBERNETES:
        add_program(simulated.built, name)
    monkeypatch.setattr(kubernetes_programs, "_SYSTEM_PATH", str(simulated.system))
    monkeypatch.setattr(kubernetes_programs, "PLUGINS_OF_CNI", simulated.cni)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return simulated


def test_programs_are_those_that_were_built(machine: Machine) -> None:
    assert machine.built.name == f"kubernetes-{VERSION}"
    add_program(Path(machine.environ["PATH"]), "kubelet")
    programs = find_programs(machine.environ)
    assert programs == {name: machine.built / name for name in OF_KUBERNETES}


def test_a_program_that_was_not_built_is_taken_from_the_path(machine: Machine) -> None:
    (machine.built / "etcd").unlink()
    other = add_program(Path(machine.environ["PATH"]), "etcd")
    assert find_programs(machine.environ)["etcd"] == other


def test_programs_that_are_nowhere_are_named_with_their_remedy(machine: Machine) -> None:
    (machine.built / "etcd").unlink()
    (machine.built / "kubelet").chmod(0o644)
    words = f"needs etcd, kubelet, which is neither in {machine.built}.*`make kubernetes`"
    with pytest.raises(ClusterError, match=words):
        find_programs(machine.environ)


def test_packages_that_are_missing_are_named(machine: Machine) -> None:
    (machine.system / "runc").unlink()
    (machine.cni / "bridge").unlink()
    words = f"needs runc, {machine.cni}/bridge, which is missing: apt install containerd"
    with pytest.raises(ClusterError, match=words):
        find_programs(machine.environ)


def test_system_programs_are_not_taken_from_the_path_of_the_caller(machine: Machine) -> None:
    (machine.system / "runc").unlink()
    add_program(Path(machine.environ["PATH"]), "runc")
    with pytest.raises(ClusterError, match="needs runc"):
        find_programs(machine.environ)


def test_without_root_it_says_so_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine.system / "runc").unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="need root: run this command as root"):
        find_programs(machine.environ)
