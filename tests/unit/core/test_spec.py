from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hopsgpu.core.spec import (
    AGENT_MIB,
    RESERVED_VARIABLES,
    ExecutorShape,
    GangSpec,
    GpuRequest,
    LaunchPlan,
    shape_of,
)
from hopsgpu.errors import ConfigError


@pytest.mark.parametrize("workers", [0, -1, 1.0, "2", True, None])
def test_workers(workers: object) -> None:
    with pytest.raises(ConfigError, match="workers="):
        GangSpec("run", workers=workers)  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus", [-1, 1.5, "1", True, None])
def test_gpus(gpus: object) -> None:
    with pytest.raises(ConfigError, match="gpus_per_worker="):
        GpuRequest(gpus)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("part", "sharing"), [(0.5, 2), (1 / 3, 3), (0.33, 3), (0.25, 4), (0.2, 5), (1 / 16, 16)]
)
def test_parts_of_a_gpu(part: float, sharing: int) -> None:
    gpus = GpuRequest(part)
    assert gpus.sharing == sharing
    assert [gpus.of(ranks * sharing) for ranks in (1, 2, 3)] == [1, 2, 3]
    spec = GangSpec("run", workers=2 * sharing, gpus=gpus)
    assert spec.visible == "rank"
    shape = shape_of(spec, cores_per_gpu=8, ranks=sharing)
    assert (shape.gpus, shape.cores) == (1, max(8 // sharing, 1) * sharing)
    with pytest.raises(ConfigError, match=f"workers={sharing + 1}.*multiple of {sharing}"):
        GangSpec("run", workers=sharing + 1, gpus=gpus)


@pytest.mark.parametrize("part", [0.3, 0.75, 0.6, 1 / 17, 1e-9, 0.999])
def test_parts_that_no_ranks_share(part: float) -> None:
    with pytest.raises(ConfigError, match="gpus_per_worker=.*1/2, 1/3, … or 1/16"):
        GpuRequest(part)


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "x" * 101, 5, "a\n"])
def test_names(name: object) -> None:
    with pytest.raises(ConfigError, match="name="):
        GangSpec(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["漢" * 67, "ü" * 99 + "漢", "𠀀" * 51], ids=["3", "2", "4"])
def test_names_are_bounded_in_bytes(name: str) -> None:
    with pytest.raises(ConfigError, match=f"name=.* 200 bytes .*{len(name.encode())}"):
        GangSpec(name)


def test_the_longest_names() -> None:
    for name in ("x" * 100, "ü" * 100, "漢" * 66, "𠀀" * 50):
        assert GangSpec(name).name == name


def test_names_are_normalised() -> None:
    assert GangSpec("re\u0301sume\u0301").name == "r\u00e9sum\u00e9"


@pytest.mark.parametrize("variable", sorted(RESERVED_VARIABLES) + ["HOPSGPU_CONTEXT"])
def test_variables_that_are_ours(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"env_vars sets {variable}"):
        GangSpec("run", env_vars={variable: "1"})


@pytest.mark.parametrize(
    "variables", [{"A B": "x"}, {"A": 1}, {1: "x"}, {"A": "\0"}, [("A", "x")], {"": "x"}]
)
def test_variables_of_a_wrong_form(variables: object) -> None:
    with pytest.raises(ConfigError, match="env_vars"):
        GangSpec("run", env_vars=variables)  # type: ignore[arg-type]


def test_a_spec_is_frozen_and_keeps_its_own_variables() -> None:
    variables = {"A": "1"}
    spec = GangSpec("run", env_vars=variables)
    variables["A"] = "2"
    assert spec.env_vars == {"A": "1"}
    with pytest.raises(FrozenInstanceError):
        spec.workers = 2  # type: ignore[misc]


def test_shape() -> None:
    spec = GangSpec("run", gpus=GpuRequest(2), memory_per_worker=(4 << 30) + 1)
    shape = shape_of(spec, cores_per_gpu=3)
    assert (shape.cores, shape.gpus) == (6, 2)
    assert shape.overhead_mib == 4096 + 1 + AGENT_MIB
    assert shape_of(GangSpec("run", cores_per_worker=5), cores_per_gpu=0).cores == 5


def test_a_printed_plan_shows_no_secret() -> None:
    spec = GangSpec("run", workers=3)
    plan = LaunchPlan(
        spec,
        executors=3,
        ranks_per_executor=1,
        shape=shape_of(spec, 1),
        queue="q",
        environment={"API_TOKEN": "hush", "COLOUR": "red"},
        paths={"run": "hdfs:///runs/1"},
        warnings=("mind the gap",),
    )
    shown = str(plan)
    assert "hush" not in shown
    for part in ("3 ranks in 3 executors", "queue q", "COLOUR=red", "hdfs:///runs/1", "mind"):
        assert part in shown


def test_one_is_counted_as_one() -> None:
    spec = GangSpec("run", workers=1)
    plan = LaunchPlan(spec, 1, 1, shape_of(spec, 1), "q", {}, {})
    assert "run: 1 rank in 1 executor of 1, queue q" in str(plan)


def test_a_gang_on_cpus() -> None:
    spec = GangSpec("run", gpus=GpuRequest(0))
    assert shape_of(spec, cores_per_gpu=3) == ExecutorShape(1, 0, 512, 4096 + AGENT_MIB)
    assert shape_of(GangSpec("run", gpus=GpuRequest(0), cores_per_worker=2), 3).cores == 2


def test_ranks_that_share_a_container() -> None:
    spec = GangSpec("run", workers=4, gpus=GpuRequest(2), memory_per_worker=2**30)
    assert shape_of(spec, 3, ranks=2) == ExecutorShape(12, 4, 512, 2048 + AGENT_MIB)


def test_independent_ranks_see_their_own_gpus_only() -> None:
    assert GangSpec("run", workers=2).visible is None
    spec = GangSpec("run", workers=2, independent_ranks=True)
    assert (spec.independent_ranks, spec.visible) == (True, "rank")
    for fields, words in (
        ({"visible": "container"}, "visible='container'"),
        ({"parameter_servers": 1}, "with parameter_servers=1"),
        ({"independent_ranks": "yes"}, "independent_ranks='yes'"),
    ):
        with pytest.raises(ConfigError, match=words):
            GangSpec("run", **{"workers": 2, "independent_ranks": True, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("placement", ["near", "", 1, True, "PACK"])
def test_placements(placement: object) -> None:
    with pytest.raises(ConfigError, match="placement=.*'pack'.*'spread'.*None"):
        GangSpec("run", placement=placement)  # type: ignore[arg-type]


def test_variables_may_have_letters_that_the_drivers_locale_lacks() -> None:
    code = "from hopsgpu.core.spec import GangSpec; GangSpec('run', env_vars={'A': '\\u6f22'})"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **ascii_only}, check=True)


def test_an_elastic_gang_has_a_smallest_size() -> None:
    spec = GangSpec("run", workers=4, least_workers=2)
    assert spec.is_elastic and (spec.least, spec.workers) == (2, 4)
    one_size = GangSpec("run", workers=4)
    assert not one_size.is_elastic and one_size.least == 4
    same = GangSpec("run", workers=2, least_workers=2)
    assert same.is_elastic, "it goes on after a loss once another executor is there"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"least_workers": 0}, r"workers=\(0, 4\)"),
        ({"least_workers": 1.5}, r"workers=\(1.5, 4\)"),
        ({"least_workers": True}, r"workers=\(True, 4\)"),
        ({"least_workers": 5}, r"workers=\(5, 4\).*\(4, 5\)"),
        (
            {"least_workers": 3, "gpus": GpuRequest(0.5)},
            r"gpus_per_worker=0.5.*multiple of 2",
        ),
        (
            {"least_workers": 2, "parameter_servers": 1},
            r"parameter_servers=1 with workers=\(2, 4\)",
        ),
    ],
)
def test_sizes_that_no_elastic_gang_has(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GangSpec("run", workers=4, **fields)


def test_a_plan_says_both_sizes() -> None:
    spec = GangSpec("run", workers=8, least_workers=2)
    plan = LaunchPlan(spec, 4, 2, shape_of(spec, 1, ranks=2), "q", {}, {})
    assert plan.least_executors == 1
    assert "run: 2 to 8 ranks in 1 to 4 executors of 2, queue q" in str(plan)
