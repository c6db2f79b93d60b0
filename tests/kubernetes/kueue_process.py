"""Kueue's controller manager as a process of this machine, for the cluster on Kubernetes.

It runs without its admission webhooks, which check and complete what people write by hand, so its
certificates are only what it needs to start. Its CRDs keep the version that it works with.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hopsgpu.devcluster.kubernetes import admin_kubeconfig
from hopsgpu.devcluster.kubernetes_programs import built_programs
from hopsgpu.devcluster.layout import ClusterLayout
from tests.conftest import until
from tests.servers import free_port

VERSION = "v1beta2"
# Kueue reads the certificate of its metrics there, also if it serves none. The process has an /etc
# of its own.
_START = (
    "mount -t tmpfs etc /etc && mkdir -p /etc/kueue/metrics"
    " && ln -s {home} /etc/kueue/metrics/certs && exec {program} --config {home}/config.yaml"
)


def program() -> Path:
    """Return the program; it is an error that it is missing."""
    path = built_programs(os.environ) / "kueue"
    assert path.exists(), f"{path} is missing: `make kubernetes` builds it once, with Go 1.25"
    return path


def crds() -> list[dict[str, Any]]:
    """Return Kueue's CRDs, whose objects are stored as the version that Kueue works with.

    By default, the API server asks a webhook of Kueue to convert another version.
    """
    found = []
    for file in sorted((built_programs(os.environ) / "kueue-crds").glob("*.yaml")):
        crd = yaml.safe_load(file.read_text())
        for version in crd["spec"]["versions"]:
            version["storage"] = version["served"] = version["name"] == VERSION
        found.append(crd)
    assert found, "`make kubernetes` puts the CRDs of Kueue beside its program"
    return found


@contextlib.contextmanager
def kueue_process(cluster_dir: Path, home: Path) -> Iterator[None]:
    """Run Kueue until the end of the context."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    names = ("-keyout", str(home / "tls.key"), "-out", str(home / "tls.crt"))
    subject = ("-subj", "/CN=kueue", "-newkey", "rsa:2048", "-nodes", "-days", "2")
    subprocess.run([openssl, "req", "-x509", *subject, *names], check=True, capture_output=True)
    config = {
        "apiVersion": f"config.kueue.x-k8s.io/{VERSION}",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": free_port(), "certDir": str(home)},
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False, "MultiKueue": False},
    }
    (home / "config.yaml").write_text(yaml.safe_dump(config))
    start = _START.format(home=home, program=program())
    kubeconfig = str(admin_kubeconfig(ClusterLayout.at(cluster_dir)))
    log = home / "kueue.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", start],
            env={"PATH": os.defpath, "KUBECONFIG": kubeconfig, "HOME": str(home)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            assert until(
                lambda: process.poll() is not None or "Starting workers" in log.read_text()
            )
            assert process.poll() is None, log.read_text()[-4000:]
            yield
            assert process.poll() is None, log.read_text()[-4000:]
        finally:
            process.terminate()
            process.wait()
