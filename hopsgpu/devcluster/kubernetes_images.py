"""The images of a cluster on Kubernetes, as archives that `docker save` would write.

The image for pods of Spark has links only: it shows the machine's own files, which pods mount. So
it has the Python, the packages and the Spark of this machine, and takes a second to build.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

PAUSE_IMAGE, SPARK_IMAGE = "hopsgpu.local/pause:1", "hopsgpu.local/machine:1"
WORKING_DIRECTORY = "/opt/spark/work-dir"
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_DIRECTORIES = (
    "etc",
    "opt",
    "opt/spark",
    WORKING_DIRECTORY.strip("/"),
    "proc",
    "tmp",
    "usr",
    "var",
)
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nspark:x:185:0:spark:/opt/spark:/bin/bash\n",
    "group": "root:x:0:\n",
    "nsswitch.conf": "hosts: files dns\n",
}
_ENTRYPOINT = r"""#!/bin/bash
# Starts a driver or an executor with the variables that Spark sets in its pods.
set -e
role=$1
case "$role" in
executor)
  options=()
  while IFS= read -r -d '' entry; do
    case "$entry" in SPARK_JAVA_OPT_*) options+=("${entry#*=}") ;; esac
  done < <(env -0)
  # As with tini in Spark's images, the JVM is not the first process, which signals do not end.
  "$JAVA_HOME/bin/java" "${options[@]}" \
    -Xms"$SPARK_EXECUTOR_MEMORY" -Xmx"$SPARK_EXECUTOR_MEMORY" \
    -cp "$SPARK_CLASSPATH:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME" &
  trap 'kill -TERM $!' TERM
  # A signal ends the first wait and not the second one.
  wait $! || wait $! ;;
driver)
  shift
  exec "$SPARK_HOME/bin/spark-submit" --deploy-mode client \
    --conf "spark.driver.bindAddress=$SPARK_DRIVER_BIND_ADDRESS" \
    --conf "spark.executorEnv.SPARK_DRIVER_POD_IP=$SPARK_DRIVER_BIND_ADDRESS" "$@" ;;
*)
  exec "$@" ;;
esac
"""


def write_images(directory: Path, pause: Path) -> list[Path]:
    """Write the archives of both images; return their paths.

    Args:
        pause: the program of the first container of each pod.
    """
    directory.mkdir(parents=True, exist_ok=True)
    archives = [directory / "pause.tar", directory / "machine.tar"]
    with _Layer() as layer:
        layer.add_file("pause", pause.read_bytes(), 0o755)
        _write(archives[0], PAUSE_IMAGE, layer.content(), {"Entrypoint": ["/pause"]})
    with _Layer() as layer:
        for name in _DIRECTORIES:
            layer.add_directory(name, 0o1777 if name == "tmp" else 0o775)
        for name, target in _LINKS.items():
            layer.add_link(name, target)
        for name, text in _ETC.items():
            layer.add_file(f"etc/{name}", text.encode(), 0o644)
        layer.add_file("opt/entrypoint.sh", _ENTRYPOINT.encode(), 0o755)
        config = {
            "Entrypoint": ["/opt/entrypoint.sh"],
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"],
            "WorkingDir": WORKING_DIRECTORY,
        }
        _write(archives[1], SPARK_IMAGE, layer.content(), config)
    return archives


class _Layer:
    """The files of an image, all of root's and without times, so that the digest stays the same."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w")  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> _Layer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def content(self) -> bytes:
        self._tar.close()
        return self._buffer.getvalue()

    def add_file(self, name: str, content: bytes, mode: int) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(content), mode
        self._tar.addfile(member, io.BytesIO(content))

    def add_directory(self, name: str, mode: int) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(member)

    def add_link(self, name: str, target: str) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = tarfile.SYMTYPE, target
        self._tar.addfile(member)


def _write(archive: Path, name: str, layer: bytes, config: Mapping[str, object]) -> None:
    digest = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    image = {
        "architecture": "amd64",
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [digest]},
        "history": [{"created_by": "hopsgpu"}],
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for part, content in (
            ("config.json", json.dumps(image).encode()),
            ("layer.tar", layer),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            member = tarfile.TarInfo(part)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
