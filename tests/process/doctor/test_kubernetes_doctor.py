"""`hopsgpu doctor` as a process, on an API server with recorded answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.bounds import HANG_SECONDS
from tests.unit.cluster_managers.kubernetes.api_server import (
    ACCESS,
    NAMESPACE,
    TOKEN,
    api_server,
    single,
)
from tests.unit.cluster_managers.kubernetes.kubeconfigs import write_kubeconfig


def test_the_doctor_examines_kubernetes_without_a_session(tmp_path: Path) -> None:
    unset = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR")
    with api_server({f"POST {ACCESS}": single("denied")}) as server:
        env = {
            **{name: value for name, value in os.environ.items() if name not in unset},
            "KUBECONFIG": str(write_kubeconfig(tmp_path, server.url)),
            "HOPSGPU_ROOT": f"file://{tmp_path}/root",
            "HOPSGPU_LOCKS": f"file://{tmp_path}/locks",
        }
        namespace = f"spark.kubernetes.namespace={NAMESPACE}"
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "hopsgpu.cli.main", "doctor", "--json", "--no-session"),
                *("--master", f"k8s://{server.url}", "--conf", namespace, "--image", "train:1"),
            ],
            env=env,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=False,
        )
        questions = len(server.bodies("POST", ACCESS))
    checks = {check["name"]: check for check in map(json.loads, ran.stdout.splitlines())}
    assert (ran.returncode, ran.stderr) == (1, "")
    assert checks["permissions"]["state"] == "wrong"
    assert checks["permissions"]["seen"].startswith(f"{questions} missing in the namespace")
    assert checks["image"]["seen"] == "train:1"
    assert checks["python"]["seen"].endswith("in train:1")
    assert checks["settings"]["state"] == checks["gpus"]["state"] == "ok"
    assert "session" not in checks and TOKEN not in ran.stdout
