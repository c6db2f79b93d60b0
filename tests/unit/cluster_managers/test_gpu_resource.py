"""The name of the YARN resource that counts GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import hopsgpu
from hopsgpu.cluster_managers.yarn.gpu_resource import choose_gpu_resource, configured_gpu_resource
from hopsgpu.errors import ConfigError

OURS, SPARKS = "spark.hopsgpu.gpu.resource", "spark.yarn.resourceGpuDeviceName"
VARIABLE = "HOPSGPU_GPU_RESOURCE"
MIG = "nvidia/miggpu"


@pytest.mark.parametrize(
    ("properties", "environ", "name"),
    [
        ({}, {}, "yarn.io/gpu"),
        ({SPARKS: MIG}, {}, MIG),
        ({OURS: MIG}, {}, MIG),
        ({OURS: f" {MIG} "}, {VARIABLE: "gpu"}, MIG),
        ({}, {VARIABLE: "gpu"}, "gpu"),
        ({OURS: MIG, SPARKS: MIG}, {}, MIG),
        ({OURS: "", SPARKS: MIG}, {}, MIG),
    ],
)
def test_the_name(properties: dict[str, str], environ: dict[str, str], name: str) -> None:
    assert choose_gpu_resource(properties, environ) == name


def test_two_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"{OURS}=a, but {SPARKS}=b: .* Set {OURS} alone"):
        choose_gpu_resource({OURS: "a", SPARKS: "b"}, {})
    with pytest.raises(ConfigError, match=f"{VARIABLE}=a, but {SPARKS}=b"):
        choose_gpu_resource({SPARKS: "b"}, {VARIABLE: "a"})


@pytest.mark.parametrize("name", ["a b", "vcores", "memory-mb", "/gpu", "a/b/c", "é"])
def test_what_is_no_name_of_such_a_resource(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be the name of the YARN resource"):
        choose_gpu_resource({OURS: name}, {})


def test_commands_read_spark_defaults(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(f"{SPARKS} {MIG}\n")
    assert configured_gpu_resource({"SPARK_CONF_DIR": str(tmp_path)}) == MIG
    assert configured_gpu_resource({}) == "yarn.io/gpu"


def test_a_session_refuses_two_names_before_it_starts_a_jvm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spark-defaults.conf").write_text(f"{SPARKS} yarn.io/gpu\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(hopsgpu.ConfigError, match=f"{OURS}={MIG}, but {SPARKS}=yarn.io/gpu"):
        hopsgpu.session("x", master="yarn", conf={OURS: MIG})
