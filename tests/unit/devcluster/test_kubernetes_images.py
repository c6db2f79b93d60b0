"""The images of a cluster on Kubernetes: their archives, and the start of executors."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.devcluster.kubernetes_images import (
    PAUSE_IMAGE,
    SPARK_IMAGE,
    WORKING_DIRECTORY,
    write_images,
)


@pytest.fixture
def archives(tmp_path: Path) -> list[Path]:
    pause = tmp_path / "pause"
    pause.write_bytes(b"program")
    return write_images(tmp_path / "deep" / "images", pause)


def parts_of(archive: Path) -> tuple[Any, Any, Path]:
    """Return manifest, configuration and the file of the only layer."""
    directory = archive.with_suffix("")
    with tarfile.open(archive) as tar:
        tar.extractall(directory, filter="data")
    (manifest,) = json.loads((directory / "manifest.json").read_text())
    (layer,) = manifest["Layers"]
    config = json.loads((directory / manifest["Config"]).read_text())
    return manifest, config, directory / layer


@pytest.mark.parametrize(("index", "name"), [(0, PAUSE_IMAGE), (1, SPARK_IMAGE)])
def test_an_archive_is_what_docker_saves(archives: list[Path], index: int, name: str) -> None:
    manifest, config, layer = parts_of(archives[index])
    assert manifest["RepoTags"] == [name]
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    assert config["rootfs"] == {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    assert (config["os"], config["architecture"]) == ("linux", "amd64")
    (entrypoint,) = config["config"]["Entrypoint"]
    with tarfile.open(layer) as tar:
        assert tar.getmember(entrypoint.strip("/")).mode == 0o755


def test_the_first_image_has_one_program(archives: list[Path]) -> None:
    _, _, layer = parts_of(archives[0])
    with tarfile.open(layer) as tar:
        assert tar.getnames() == ["pause"]
        program = tar.extractfile("pause")
        assert program is not None and program.read() == b"program"


def test_the_second_image_has_directories_and_links_only(archives: list[Path]) -> None:
    _, config, layer = parts_of(archives[1])
    with tarfile.open(layer) as tar:
        links = {member.name: member.linkname for member in tar if member.issym()}
        assert links["bin"] == "usr/bin" and links["lib64"] == "usr/lib64"
        assert tar.getmember("tmp").mode == 0o1777
        assert tar.getmember(WORKING_DIRECTORY.strip("/")).isdir()
        assert {member.uid for member in tar} == {0}
        places = [name.rpartition("/")[0] for name in tar.getnames()]
        assert all(place in tar.getnames() for place in filter(None, places))
    assert config["config"]["WorkingDir"] == WORKING_DIRECTORY


def test_the_same_content_has_the_same_digest(archives: list[Path], tmp_path: Path) -> None:
    again = write_images(tmp_path / "again", tmp_path / "pause")
    for first, second in zip(archives, again, strict=True):
        assert first.read_bytes() == second.read_bytes()


@pytest.fixture
def entrypoint(archives: list[Path], tmp_path: Path) -> Path:
    _, _, layer = parts_of(archives[1])
    with tarfile.open(layer) as tar:
        tar.extract("opt/entrypoint.sh", tmp_path, filter="data")
    return tmp_path / "opt" / "entrypoint.sh"


def start(entrypoint: Path, *arguments: str, **environ: str) -> list[str]:
    """Run the entrypoint with programs that print their arguments; return these."""
    program = "#!/bin/sh\nfor a; do printf '%s\\0' \"$a\"; done\n"
    homes = {name: entrypoint.parent / name for name in ("JAVA_HOME", "SPARK_HOME")}
    for home, name in ((homes["JAVA_HOME"], "java"), (homes["SPARK_HOME"], "spark-submit")):
        (home / "bin").mkdir(parents=True)
        (home / "bin" / name).write_text(program)
        (home / "bin" / name).chmod(0o755)
    variables = {name: str(home) for name, home in homes.items()}
    result = subprocess.run(
        [entrypoint, *arguments],
        env={"PATH": "/usr/bin:/bin", **variables, **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split("\0")[:-1]


def test_an_executor_gets_each_option_of_java_as_one_argument(entrypoint: Path) -> None:
    arguments = start(
        entrypoint,
        "executor",
        SPARK_JAVA_OPT_0="-Da=b c",
        SPARK_JAVA_OPT_1="-Dx=1=2",
        SPARK_JAVA_OPT_2="-Dlines=a\nb",
        SPARK_EXECUTOR_MEMORY="384m",
        SPARK_CLASSPATH="/a:/b",
        SPARK_DRIVER_URL="spark://CoarseGrainedScheduler@10.0.0.1:7078",
        SPARK_EXECUTOR_ID="3",
        SPARK_EXECUTOR_CORES="2",
        SPARK_APPLICATION_ID="spark-1",
        SPARK_EXECUTOR_POD_IP="10.0.0.4",
        SPARK_RESOURCE_PROFILE_ID="1",
        SPARK_EXECUTOR_POD_NAME="train-exec-3",
    )
    options = arguments[: arguments.index("-Xms384m")]
    assert sorted(options) == ["-Da=b c", "-Dlines=a\nb", "-Dx=1=2"]
    assert dict(zip(arguments[-14::2], arguments[-13::2], strict=True)) == {
        "--driver-url": "spark://CoarseGrainedScheduler@10.0.0.1:7078",
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.4",
        "--resourceProfileId": "1",
        "--podName": "train-exec-3",
    }
    assert arguments[-15].endswith("KubernetesExecutorBackend")
    assert arguments[arguments.index("-cp") + 1].startswith("/a:/b:")


def test_a_driver_is_submitted_in_its_own_pod(entrypoint: Path) -> None:
    arguments = start(
        entrypoint, "driver", "--class", "A", "app.py", SPARK_DRIVER_BIND_ADDRESS="10.0.0.5"
    )
    assert arguments[:2] == ["--deploy-mode", "client"]
    assert "spark.driver.bindAddress=10.0.0.5" in arguments
    assert arguments[-3:] == ["--class", "A", "app.py"]


def test_another_command_is_run_as_it_is(entrypoint: Path) -> None:
    assert start(entrypoint, "printf", "%s\\0", "a b", "$c") == ["a b", "$c"]
