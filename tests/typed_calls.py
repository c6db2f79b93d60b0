"""Calls as users write them, for mypy alone: it must accept some and refuse the others.

An ignored error that is none is an error of mypy (`warn_unused_ignores`), so this file fails the
check where a public signature is lost on the way to a type checker.
"""

from __future__ import annotations

from typing import assert_type

import hopsgpu


def train(rate: float) -> float:
    return rate


def accepted() -> None:
    assert_type(hopsgpu.launch(train, args=(0.1,), workers=2), hopsgpu.GangResult)
    assert_type(hopsgpu.submit(train, kwargs={"rate": 0.1}, retries=1), hopsgpu.Run)
    assert_type(hopsgpu.plan(train, memory_per_worker=2**30), hopsgpu.types.LaunchPlan)
    assert_type(hopsgpu.hold(workers=2, idle_timeout=None), hopsgpu.Gang)
    found = hopsgpu.search(train, lambda trial: None, trials=9, max_concurrent=2, sampler="tpe")
    assert_type(found, hopsgpu.types.SearchResult)
    told = hopsgpu.ablate(train, {"slow": {"rate": 0.0}}, seeds=2, max_concurrent=2)
    assert_type(told, hopsgpu.types.AblationResult)
    assert_type(hopsgpu.usage("day", "30d", until=None)[0], hopsgpu.types.UsageRow)


def refused() -> None:
    hopsgpu.launch(train, wrokers=2)  # type: ignore[call-arg]
    hopsgpu.launch(train, "name")  # type: ignore[call-arg]
    hopsgpu.submit(train, workers="2")  # type: ignore[arg-type]
    hopsgpu.plan()  # type: ignore[call-arg]
    hopsgpu.hold()  # type: ignore[call-arg]
    hopsgpu.hold(workers=1, retries=1)  # type: ignore[call-arg]
    hopsgpu.search(train, {}, max_concurrent=2)  # type: ignore[call-arg]
    hopsgpu.usage("week")  # type: ignore[arg-type]
    hopsgpu.ablate(train, {}, max_concurrent=2, direction="up")  # type: ignore[arg-type]
