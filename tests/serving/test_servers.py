"""Real servers load what `ModelVersion.export` wrote, and answer (`make serving`).

Their packages exclude each other and ours, so that they have environments of their own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.serving import kserve
from hopsgpu.serving.export_layout import ServedVersion
from hopsgpu.serving.model_signature import parse
from tests.bounds import HANG_SECONDS
from tests.served_models import Published, X, publish
from tests.servers import free_port, running_server

ROOT = Path(__file__).parents[2]
FORMATS = ("pickle", "skops", "xgboost")


def environment(name: str) -> Path:
    directory = ROOT / f".venv-{name}"
    if not (directory / "bin" / "python").exists():
        pytest.fail(f"{directory} is missing: run `make serving`")
    return directory


@pytest.fixture
def published(tmp_path: Path) -> dict[str, Published]:
    store = ModelStore(f"file://{tmp_path}/models")
    return {name: publish(store, name, tmp_path) for name in FORMATS}


@contextlib.contextmanager
def serving(
    command: list[str], port: int, log: Path, variables: Mapping[str, str], directory: Path
) -> Iterator[str]:
    """Run a server until the end of the block; yield its URL once it is ready."""
    url = f"http://127.0.0.1:{port}"

    def ready() -> bool:
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{url}/v2/health/ready", timeout=HANG_SECONDS).status_code == 200
        return False

    with running_server(command, directory, log, ready, variables):
        yield url


def infer(url: str, model: str) -> Any:
    """The first output for X, by the Open Inference Protocol."""
    tensor = {"name": "x", "datatype": "FP32", "shape": list(X.shape), "data": X.ravel().tolist()}
    answer = requests.post(
        f"{url}/v2/models/{model}/infer", json={"inputs": [tensor]}, timeout=HANG_SECONDS
    )
    assert answer.status_code == 200, answer.text
    return np.asarray(answer.json()["outputs"][0]["data"])


def test_mlserver(published: dict[str, Published], tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "out"
    for one in published.values():
        one.version.export("mlserver", out=out, trust=True)
    # A second model of our own runtime, in the same process.
    shutil.copytree(out / "skops", out / "again")
    settings = out / "again" / "model-settings.json"
    settings.write_text(settings.read_text().replace('"name": "skops"', '"name": "again"'))
    variables = {
        "MLSERVER_HTTP_PORT": str(port),
        "MLSERVER_GRPC_PORT": str(free_port()),
        "MLSERVER_METRICS_PORT": str(free_port()),
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_PARALLEL_WORKERS": "0",
    }
    command = [str(environment("mlserver") / "bin" / "mlserver"), "start", "."]
    with serving(command, port, tmp_path / "log", variables, out) as url:
        for name, one in published.items():
            np.testing.assert_allclose(infer(url, name), one.answer, rtol=1e-5)
        np.testing.assert_allclose(infer(url, "again"), published["skops"].answer)


def test_triton(published: dict[str, Published], tmp_path: Path) -> None:
    port, out, env = free_port(), tmp_path / "out", environment("serving")
    for one in published.values():
        one.version.export("triton", out=out, trust=True)
    (packages,) = env.glob("lib/python3.*/site-packages")
    home = packages / "pytriton" / "tritonserver"
    # pytriton keeps the backend's program of each Python elsewhere.
    backends = tmp_path / "backends"
    shutil.copytree(home / "backends", backends)
    python = packages.parent.name.removeprefix("python")
    stub = home / "python_backend_stubs" / python / "triton_python_backend_stub"
    shutil.copy(stub, backends / "python")
    command = [str(home / "bin" / "tritonserver"), "--model-repository", str(out)]
    command += ["--backend-directory", str(backends), "--http-address", "127.0.0.1"]
    command += ["--http-port", str(port), "--allow-grpc", "false", "--allow-metrics", "false"]
    variables = {
        "PATH": f"{env}/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
        "PYTHONPATH": str(packages),
    }
    with serving(command, port, tmp_path / "log", variables, tmp_path) as url:
        for name, one in published.items():
            np.testing.assert_allclose(infer(url, name), one.answer, rtol=1e-5)


def test_kserves_python_server(published: dict[str, Published], tmp_path: Path) -> None:
    port, one = free_port(), published["skops"]
    known = ServedVersion(
        name="net",
        version=1,
        url="hdfs://nn/models/net/1",
        model=one.version.formats[0],
        files=("classifier.skops",),
        signature=parse(one.version.manifest["signature"]),
    )
    for path, text in kserve.layout(known, namenode="http://nn:9870").texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    files = one.version.download(tmp_path / "mnt")
    command = [str(environment("serving") / "bin" / "python"), "predictor/predictor.py"]
    command += ["--model_name=net", f"--model_dir={files}", f"--http_port={port}"]
    command += ["--enable_grpc=false"]
    with serving(command, port, tmp_path / "log", {}, tmp_path) as url:
        np.testing.assert_allclose(infer(url, "net"), one.answer)
        asked = {"instances": X.tolist()}
        answer = requests.post(f"{url}/v1/models/net:predict", json=asked, timeout=HANG_SECONDS)
        assert answer.json() == {"predictions": one.answer.tolist()}
