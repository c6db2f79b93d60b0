"""What a launch on YARN goes on without becomes a warning of its plan."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from hopsgpu.backends.spark.fit import fit_on_cluster
from hopsgpu.core.spec import GangSpec
from tests.unit.cluster_managers.test_capacity import recorded


def test_problems_of_the_snapshot_are_warnings_of_the_plan() -> None:
    snapshot = replace(recorded("capacity_half"), problems=("no limits are known",))
    application = SimpleNamespace(
        setup_warnings=(),
        check_wait=lambda seconds: None,
        snapshot=lambda seconds: snapshot,
        setting=lambda name: None,
        versions={"spark": "4.3.0"},
    )
    fit = fit_on_cluster(GangSpec("fit"), application)  # type: ignore[arg-type]
    assert fit.warnings == ("no limits are known",)
    assert fit.queue == snapshot.queues[0].path == "root.a"
    application.versions["spark"] = "3.5.9"
    fit = fit_on_cluster(GangSpec("fit"), application)  # type: ignore[arg-type]
    assert len(fit.warnings) == 2 and "Spark 3.5.9 cannot cancel a gang" in fit.warnings[1]
