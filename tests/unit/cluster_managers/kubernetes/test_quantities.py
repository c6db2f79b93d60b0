"""Quantities of Kubernetes: each suffix, exact values, and texts that are none."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hopsgpu.cluster_managers.kubernetes.quantities import parse_quantity
from hopsgpu.errors import HopsGpuError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("7", 7),
        (3, 3),
        ("0.5", Fraction(1, 2)),
        (".25", Fraction(1, 4)),
        ("+.25", Fraction(1, 4)),
        ("5.", 5),
        ("5.Ki", 5 * 1024),
        ("100m", Fraction(1, 10)),
        ("3920m", Fraction(392, 100)),
        ("1500u", Fraction(15, 10**4)),
        ("250n", Fraction(1, 4 * 10**6)),
        ("2k", 2000),
        ("128M", 128 * 10**6),
        ("1G", 10**9),
        ("1E", 10**18),
        ("1e3", 1000),
        ("1E3", 1000),
        ("12e-1", Fraction(12, 10)),
        ("16334Mi", 16334 * 2**20),
        ("264212084Ki", 264212084 * 1024),
        ("1.5Gi", 3 * 2**29),
        ("2Ei", 2**61),
        (" 2 ", 2),
        ("+2", 2),
    ],
)
def test_a_quantity_is_exact(text: object, value: int | Fraction) -> None:
    assert parse_quantity(text) == value


def test_tenths_add_up_to_a_whole() -> None:
    assert sum(parse_quantity("100m") for _ in range(10)) == 1


def test_a_quantity_has_bounds() -> None:
    assert parse_quantity("-2") == 0
    assert parse_quantity("9E") == 9 * 10**18
    assert parse_quantity("99999999999999999999E") == parse_quantity("1e99") == 2**63


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "1 Gi", "1gi", "1K", "1Mib", "two", "1e", "1e999", "0x10", "1.2.3", ".", None, {}],
)
def test_other_texts_are_refused(text: object) -> None:
    with pytest.raises(HopsGpuError, match="where a quantity is expected"):
        parse_quantity(text)


def test_a_long_text_is_refused_in_part() -> None:
    with pytest.raises(HopsGpuError) as caught:
        parse_quantity("9" * 10**6)
    assert len(str(caught.value)) < 200
