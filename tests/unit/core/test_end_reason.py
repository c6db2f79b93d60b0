"""Why a run ended, by the error and by the record."""

from __future__ import annotations

import pytest

from hopsgpu.core.end_reason import EndReason, reason_of_error
from hopsgpu.core.gang import GangState
from hopsgpu.errors import (
    Cancelled,
    CapacityError,
    ConfigError,
    DiscoveryError,
    GangTimeout,
    HopsGpuError,
    RankFailed,
    StoreError,
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Cancelled("enough"), EndReason.CANCELLED),
        (KeyboardInterrupt(), EndReason.INTERRUPTED),
        (SystemExit(143), EndReason.INTERRUPTED),
        (GangTimeout("late", granted=0, wanted=1), EndReason.NOT_GRANTED),
        (CapacityError("never"), EndReason.NOT_GRANTED),
        (ConfigError("odd"), EndReason.REFUSED),
        (DiscoveryError("none"), EndReason.REFUSED),
        (RankFailed("boom"), EndReason.USER_ERROR),
        (StoreError("full", "quota"), EndReason.LAKE_FAILED),
        (HopsGpuError("what"), EndReason.OTHER),
        (ZeroDivisionError(), EndReason.OTHER),
    ],
)
def test_the_type_of_an_error_is_a_reason(error: BaseException, reason: EndReason) -> None:
    assert reason_of_error(error) is reason


@pytest.mark.parametrize("error", [StoreError("full", "quota"), OSError("odd")])
def test_what_fails_while_a_model_is_published_is_its_publication(error: Exception) -> None:
    assert reason_of_error(error, is_publishing=True) is EndReason.PUBLISH_FAILED


def test_a_run_that_is_interrupted_while_it_publishes_is_interrupted() -> None:
    assert reason_of_error(KeyboardInterrupt(), is_publishing=True) is EndReason.INTERRUPTED
    assert reason_of_error(Cancelled("enough"), is_publishing=True) is EndReason.CANCELLED


def test_every_state_of_an_end_but_failed_is_a_reason() -> None:
    reasons = {reason.value for reason in EndReason}
    assert {GangState.SUCCEEDED.value, GangState.CANCELLED.value} <= reasons
