"""How long GPUs may idle: what a launch says, what its application says, and where neither can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hopsgpu.core.spec import GangSpec, GpuRequest
from hopsgpu.display.progress import progress_of
from hopsgpu.errors import ConfigError
from hopsgpu.launcher.arguments import HeldArguments, gang_in, launch_on
from hopsgpu.launcher.options import HeldRunOptions, LaunchOptions


def train() -> None: ...


def application(gpu_idle_timeout: float | None) -> Any:
    """An application in which only the settings that a launch reads are there."""
    return SimpleNamespace(
        image=None,
        option=lambda name: None,
        gpu_idle_timeout=gpu_idle_timeout,
        files=None,
        added=None,
    )


def bounded(default: float | None, **given: Any) -> float | None:
    options = LaunchOptions(train_fn=train, **given)
    spec = options.gang_of(**options.of_run())
    return gang_in(application(default), spec, None, options.gpu_idle_timeout).spec.gpu_idle_timeout


@pytest.mark.parametrize(
    ("default", "given", "seconds"),
    [
        (None, None, None),
        (600.0, None, 600.0),
        (600.0, "30m", 1800.0),
        (None, "30m", 1800.0),
        (600.0, "off", None),
        (None, "off", None),
    ],
)
def test_a_launch_says_so_itself_or_else_its_application(
    default: float | None, given: str | None, seconds: float | None
) -> None:
    assert bounded(default, gpu_idle_timeout=given) == seconds


def test_a_gang_on_cpus_has_no_gpus_that_could_idle() -> None:
    assert bounded(600.0, gpus_per_worker=0) is None
    assert bounded(600.0, gpus_per_worker=0, gpu_idle_timeout="off") is None


def held(gpus: float) -> HeldArguments:
    return HeldArguments(
        spec=GangSpec("held", gpus=GpuRequest(gpus)),
        application=application(600.0),
        python_env=None,
        idle_timeout=None,
        frameworks=(),
        progress=cast(Any, progress_of("off")),
    )


def test_a_launch_on_a_gang_held_on_cpus_is_refused() -> None:
    options = HeldRunOptions(train_fn=train, gpu_idle_timeout="5m")
    with pytest.raises(
        ConfigError, match="gpu_idle_timeout='5m' .*gpus_per_worker=0.*run_timeout="
    ):
        launch_on(held(0), options)
