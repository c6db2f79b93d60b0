"""When idle GPUs lead to a warning, and when they end a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hopsgpu.core.gpu_idle import GpuIdleWatch, IdleBounds, IdleStep, IdleVerdict
from hopsgpu.core.gpu_usage import GpuSample, GpuUsage

Use = Mapping[str, float | None]


class Gang:
    def __init__(
        self,
        warning: float | None = 60.0,
        timeout: float | None = None,
        gpus: Mapping[int, Sequence[str]] | None = None,
    ) -> None:
        self.now = 1000.0
        self._gpus = {0: ("GPU-0",), 1: ("GPU-1",)} if gpus is None else gpus
        self.watch = GpuIdleWatch(self._gpus, IdleBounds(warning, timeout), self.now)
        self.warnings: list[str] = []
        for rank in self._gpus:
            self.watch.record_function_start(rank, self.now)

    def go(self, seconds: int, **use: float | None) -> IdleVerdict | None:
        """Let time pass with this utilisation by GPU; return the verdict that ends the run.

        A GPU that is not named sends no sample.
        """
        for _ in range(seconds):
            self.now += 1.0
            for rank, own in self._gpus.items():
                given = [uuid for uuid in own if uuid.replace("-", "") in use]
                samples = [
                    GpuSample(self.now, uuid, utilisation=use[uuid.replace("-", "")])
                    for uuid in given
                ]
                self.watch.add_samples(rank, samples, self.now)
            verdict = self.watch.verdict(self.now)
            if verdict.step is IdleStep.WARN:
                self.warnings.append(str(verdict))
            if verdict.step is IdleStep.END:
                return verdict
        return None


def test_a_gang_that_idles_is_told_of_once() -> None:
    gang = Gang()
    gang.go(59, GPU0=0.0, GPU1=0.04)
    assert gang.warnings == []
    gang.go(600, GPU0=0.0, GPU1=0.04)
    assert gang.warnings == ["all 2 GPUs have idled for 60 s (utilisation under 5 %)"]


def test_a_gpu_that_is_used_begins_anew() -> None:
    gang = Gang()
    for _ in range(20):
        gang.go(50, GPU0=0.0, GPU1=0.0)
        gang.go(1, GPU0=0.05, GPU1=0.9)
    assert gang.warnings == []
    for _ in range(2):
        gang.go(70, GPU0=0.0, GPU1=0.0)
        gang.go(1, GPU0=1.0, GPU1=1.0)
    assert len(gang.warnings) == 2


def test_a_part_that_idles_is_told_of_and_then_all() -> None:
    gang = Gang(warning=600.0)
    gang.go(700, GPU0=0.8, GPU1=0.0)
    assert gang.warnings == ["1 of 2 GPUs (of rank 1) has idled for 10 min (utilisation under 5 %)"]
    gang.go(700, GPU0=0.0, GPU1=0.0)
    assert gang.warnings[1:] == ["all 2 GPUs have idled for 10 min (utilisation under 5 %)"]


def test_a_timeout_ends_a_gang_of_which_all_gpus_idle() -> None:
    gang = Gang(warning=None, timeout=30.0)
    assert gang.go(300, GPU0=0.0, GPU1=0.5) is None
    assert gang.go(29, GPU0=0.0, GPU1=0.0) is None
    verdict = gang.go(10, GPU0=0.0, GPU1=0.0)
    assert verdict == IdleVerdict(IdleStep.END, 30.0, 2, 2, (0, 1))
    assert gang.warnings == []


def test_without_a_timeout_nothing_ends() -> None:
    assert Gang(timeout=None).go(5000, GPU0=0.0, GPU1=0.0) is None


def test_the_unknown_neither_warns_nor_ends() -> None:
    """Simulated GPUs and MIG devices have no utilisation."""
    for use in ({}, {"GPU0": None, "GPU1": None}):
        gang = Gang(timeout=30.0)
        assert gang.go(5000, **use) is None
        assert gang.warnings == []


def test_one_gpu_that_is_unknown_keeps_the_run_but_not_the_warning() -> None:
    gang = Gang(timeout=30.0)
    assert gang.go(5000, GPU0=0.0, GPU1=None) is None
    assert gang.warnings == ["1 of 2 GPUs (of rank 0) has idled for 60 s (utilisation under 5 %)"]


def test_time_without_samples_is_not_idle_time() -> None:
    """The network to a node was cut, or its driver hung."""
    gang = Gang(warning=200.0, timeout=100.0)
    gang.go(50, GPU0=0.0, GPU1=0.0)
    assert gang.go(200) is None
    assert gang.warnings == []
    assert gang.go(99, GPU0=0.0, GPU1=0.0) is None
    assert gang.go(2, GPU0=0.0, GPU1=0.0) is not None


def test_samples_that_come_late_count() -> None:
    gang = Gang(timeout=100.0)
    gang.go(50, GPU0=0.0, GPU1=0.0)
    gang.go(20)
    assert gang.go(31, GPU0=0.0, GPU1=0.0) is not None


def test_a_rank_that_has_ended_leaves_its_gpu_idle() -> None:
    gang = Gang(timeout=100.0)
    gang.go(10, GPU0=1.0, GPU1=0.0)
    gang.watch.record_rank_end(0, gang.now)
    assert gang.go(99, GPU1=0.0) is None
    verdict = gang.go(1, GPU1=0.0)
    assert verdict is not None and verdict.gpus == 2


def test_a_gpu_of_several_ranks_counts_once() -> None:
    gang = Gang(gpus={0: ("GPU-0",), 1: ("GPU-0",)})
    gang.go(100, GPU0=0.0)
    assert gang.warnings == ["the gang's GPU has idled for 60 s (utilisation under 5 %)"]


def test_ranks_without_gpus_never_idle() -> None:
    gang = Gang(timeout=1.0, gpus={0: (), 1: ()})
    assert gang.go(100) is None and gang.warnings == []
    assert gang.watch.unwatched_ranks(gang.now) == ()


def test_a_timeout_that_watches_nothing_is_told_of_once() -> None:
    gang = Gang(timeout=600.0)
    gang.go(30, GPU0=0.5)
    assert gang.watch.unwatched_ranks(gang.now) == ()
    gang.go(1, GPU0=0.5)
    assert gang.watch.unwatched_ranks(gang.now) == (1,)
    assert gang.watch.unwatched_ranks(gang.now) == ()
    silent = Gang(timeout=None)
    silent.go(100)
    assert silent.watch.unwatched_ranks(silent.now) == ()


def test_many_ranks_are_not_all_listed() -> None:
    gang = Gang(gpus={rank: (f"GPU-{rank}",) for rank in range(12)})
    gang.go(61, **dict.fromkeys((f"GPU{rank}" for rank in range(11)), 0.0), GPU11=1.0)
    assert gang.warnings == [
        "11 of 12 GPUs (of ranks 0, 1, 2, 3, 4, 5, 6, 7, …) have idled for 60 s"
        " (utilisation under 5 %)"
    ]


def test_unused_seconds_are_those_between_samples() -> None:
    use = GpuUsage()
    for time, busy in ((0.0, 0.0), (1.0, 0.0), (2.0, 0.5), (3.0, 0.049), (60.0, 0.0), (61.0, None)):
        use = use.with_sample(GpuSample(time, "GPU-0", utilisation=busy))
    # The gap of 57 s counts for nothing.
    assert use.unused == 2.0


def test_what_gpus_did_before_the_function_ran_does_not_count() -> None:
    watch = GpuIdleWatch({0: ("GPU-0",)}, IdleBounds(None, 60.0), 0.0)

    def step_at(now: int) -> IdleStep:
        watch.add_samples(0, [GpuSample(float(now), "GPU-0", utilisation=0.0)], float(now))
        return watch.verdict(float(now)).step

    assert {step_at(now) for now in range(1, 300)} == {IdleStep.NOTHING}
    watch.record_function_start(0, 300.0)
    assert {step_at(now) for now in range(301, 360)} == {IdleStep.NOTHING}
    assert step_at(360) is IdleStep.END
