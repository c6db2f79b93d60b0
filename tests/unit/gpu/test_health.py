"""Verdicts on readings of a GPU's health."""

from __future__ import annotations

import pytest

from hopsgpu.gpu.node.health import BAD, HEALTHY, WATCH, XIDS, Readings, judge_readings, judge_xid


def test_absent_facts_are_no_problems() -> None:
    assert judge_readings(Readings()) == (HEALTHY, "")


def test_a_gpu_that_is_well() -> None:
    well = Readings(
        recovery_action=0,
        volatile_double_bit=0,
        aggregate_double_bit=0,
        sram_threshold_exceeded=False,
        remapped_correctable=3,
        remapped_uncorrectable=2,
        remap_pending=False,
        remap_failed=False,
        retired_pages=4,
        retirement_pending=False,
        hw_thermal=False,
        hw_power_brake=False,
        sw_thermal=False,
    )
    assert judge_readings(well) == (HEALTHY, "")


@pytest.mark.parametrize(
    ("readings", "state", "words"),
    [
        (Readings(problem="GPU is lost"), BAD, "GPU is lost"),
        (Readings(recovery_action=1), BAD, "'Reset': nvidia-smi --gpu-reset"),
        (Readings(recovery_action=2), BAD, "'Reboot'"),
        (Readings(recovery_action=3), BAD, "'Drain P2P'"),
        (Readings(recovery_action=4), WATCH, "'Drain and Reset'"),
        (Readings(recovery_action=7), BAD, "'System Reboot'"),
        (Readings(recovery_action=99), WATCH, "'99'"),
        (Readings(volatile_double_bit=2), BAD, "2 double-bit ECC errors since"),
        (Readings(volatile_double_bit=2, recovery_action=0), WATCH, "2 double-bit ECC errors"),
        (Readings(volatile_double_bit=2, recovery_action=1), BAD, "2 double-bit ECC errors"),
        (Readings(aggregate_double_bit=5), WATCH, "5 double-bit ECC errors over its lifetime"),
        (Readings(sram_threshold_exceeded=True), BAD, "NVIDIA's threshold"),
        (Readings(remap_failed=True, remapped_uncorrectable=8), BAD, "8 rows remapped"),
        (Readings(remap_pending=True, remapped_correctable=1), WATCH, "1 for correctable"),
        (Readings(retirement_pending=True, retired_pages=7), WATCH, "(7 retired)"),
        (Readings(retired_pages=60), WATCH, "60 pages of its memory are retired, of 64 at most"),
        (Readings(hw_thermal=True), WATCH, "cooling"),
        (Readings(hw_power_brake=True), WATCH, "power brake"),
        (Readings(sw_thermal=True), WATCH, "the driver slows it down"),
    ],
)
def test_each_rule(readings: Readings, state: str, words: str) -> None:
    verdict = judge_readings(readings)
    assert verdict.state == state
    assert words in verdict.reason


def test_reasons_begin_with_the_worst() -> None:
    verdict = judge_readings(Readings(hw_thermal=True, remap_pending=True, volatile_double_bit=1))
    assert verdict.state == BAD
    first, second, third = verdict.reason.split("; ")
    assert "1 double-bit" in first and "row remapping is pending" in second and "cooling" in third


def test_nothing_else_counts_of_a_gpu_that_does_not_answer() -> None:
    lost = Readings(problem="GPU is lost", volatile_double_bit=2**32 - 1)
    assert judge_readings(lost) == (BAD, "GPU is lost")


@pytest.mark.parametrize(
    ("numbers", "state"),
    [
        ((13, 31, 43, 45, 68), HEALTHY),
        ((63, 92, 94, 109, 154), WATCH),
        ((48, 64, 74, 79, 95, 119, 120), BAD),
    ],
)
def test_xids(numbers: tuple[int, ...], state: str) -> None:
    for number in numbers:
        verdict = judge_xid(number)
        assert verdict.state == state == XIDS[number].state
        assert f"XID {number}, {XIDS[number].meaning}" in verdict.reason


def test_an_xid_that_is_not_known_has_the_gpu_watched() -> None:
    verdict = judge_xid(9999)
    assert verdict.state == WATCH and "XID 9999" in verdict.reason
