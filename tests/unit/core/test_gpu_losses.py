"""The parts of a run's GPU seconds, which add up, and what most of them were lost to."""

from __future__ import annotations

import itertools

import pytest

from hopsgpu.core.gpu_losses import (
    RankLosses,
    split_gpu_seconds,
    sum_gpu_seconds,
    time_not_training,
)
from hopsgpu.core.run_values import GpuSeconds


def test_kinds_add_up_to_what_was_held() -> None:
    seconds = split_gpu_seconds(2400.0, 2000.0, 100.0, 60.0, RankLosses(720.0, 30.0, 40.0))
    assert (seconds.held, seconds.training, seconds.publishing, seconds.idle) == (
        *(2400.0, 2000.0, 100.0),
        300.0,
    )
    assert seconds.kinds() == {
        "training": 1210.0,
        "waiting for data": 720.0,
        "checkpointing": 30.0,
        "unused": 40.0,
        "publishing": 100.0,
        "starting": 60.0,
        "idle": 240.0,
    }
    assert sum(seconds.kinds().values()) == seconds.held


def test_parts_are_never_more_than_the_whole() -> None:
    """A rank may have waited before the others ran, so more than counts as training."""
    amounts = (0.0, 3.0, 8.0)
    for starting, data, saves, unused in itertools.product(amounts, repeat=4):
        seconds = split_gpu_seconds(10.0, 5.0, 1.0, starting, RankLosses(data, saves, unused))
        kinds = seconds.kinds()
        assert sum(kinds.values()) == 10.0
        assert min(kinds.values()) >= 0.0
    assert split_gpu_seconds(10.0, 5.0, losses=RankLosses(3.0, 8.0, 8.0)).checkpointing == 2.0


def test_attempts_add_up() -> None:
    first = split_gpu_seconds(100.0, 60.0, 0.0, 30.0, RankLosses(10.0))
    second = split_gpu_seconds(50.0, 40.0, 5.0, 2.0, RankLosses(1.0, 2.0, 3.0))
    both = sum_gpu_seconds([first, second])
    assert (both.held, both.training, both.idle, both.starting) == (150.0, 100.0, 45.0, 32.0)
    assert (both.waiting_for_data, both.checkpointing, both.unused) == (11.0, 2.0, 3.0)
    assert sum(both.kinds().values()) == both.held


@pytest.mark.parametrize(
    ("seconds", "begin", "mends"),
    [
        (
            split_gpu_seconds(2400.0, 2000.0, 0.0, 60.0, RankLosses(720.0, 30.0, 40.0)),
            "12 of 40 GPU minutes waited for data: ",
            "loader(num_workers)",
        ),
        (
            split_gpu_seconds(60.0, 40.0, 0.0, 18.0),
            "18 of 60 GPU seconds went into starting the ra",
            "hold()",
        ),
        (
            split_gpu_seconds(36_000.0, 35_000.0, losses=RankLosses(0.0, 9000.0)),
            "2.5 of 10 GPU hours went into checkpoint calls: ",
            "save less often",
        ),
        (
            split_gpu_seconds(600.0, 590.0, losses=RankLosses(unused=300.0)),
            "5 of 10 GPU minutes had GPUs that idled while the function ran (utilisation under 5 %",
            "on the GPU",
        ),
        (
            split_gpu_seconds(600.0, 300.0, 240.0),
            "4 of 10 GPU minutes went into publishing",
            "model_dir",
        ),
        (
            split_gpu_seconds(600.0, 300.0),
            "5 of 10 GPU minutes were held while no rank ran",
            "workers=(2, 8)",
        ),
    ],
)
def test_the_time_not_spent_training_has_its_remedy(
    seconds: GpuSeconds, begin: str, mends: str
) -> None:
    line = time_not_training(seconds)
    assert line.startswith(begin) and mends in line
    assert "\n" not in line


@pytest.mark.parametrize(
    "seconds",
    [
        GpuSeconds(),
        split_gpu_seconds(59.9, 0.0),
        split_gpu_seconds(70.0, 65.5),
        split_gpu_seconds(1000.0, 951.0),
        split_gpu_seconds(1000.0, 1000.0, losses=RankLosses(49.0)),
    ],
)
def test_little_is_no_loss(seconds: GpuSeconds) -> None:
    assert time_not_training(seconds) == ""


def test_what_a_rank_lost_counts_once() -> None:
    """A GPU is not used while its rank waits for data."""
    lost = RankLosses(10.0, 5.0, unused=40.0)
    assert lost.without_overlap() == RankLosses(10.0, 5.0, 25.0)
    assert RankLosses(10.0, 5.0, 12.0).without_overlap().unused == 0.0
    assert (lost + lost).of_gpus(0.5) == lost


def test_a_text_shows_the_parts_that_there_are() -> None:
    assert str(GpuSeconds(8.0, 4.0, 0.0, 4.0)) == (
        "GpuSeconds(held 8.0, training 4.0, publishing 0.0, idle 4.0)"
    )
    assert str(split_gpu_seconds(8.0, 4.0, 0.0, 3.0, RankLosses(2.0))) == (
        "GpuSeconds(held 8.0, training 4.0, publishing 0.0, idle 4.0, waiting_for_data 2.0,"
        " starting 3.0)"
    )
