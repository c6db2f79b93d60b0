"""Quantities of Kubernetes as numbers. Pure.

Source: the Kubernetes documentation, "Resource Management for Pods and Containers" and "Quantity".
"""

from __future__ import annotations

import re
from fractions import Fraction

from hopsgpu.errors import HopsGpuError

_FORM = re.compile(
    r"([+-]?(?:\d{1,20}(?:\.\d{0,20})?|\.\d{1,20}))(?:[eE]([+-]?\d{1,2})|([A-Za-z]{0,2}))"
)
_SUFFIXES = {
    **{"n": Fraction(1, 10**9), "u": Fraction(1, 10**6), "m": Fraction(1, 1000), "": Fraction(1)},
    **{name: Fraction(1000**power) for power, name in enumerate("kMGTPE", start=1)},
    **{f"{name}i": Fraction(1024**power) for power, name in enumerate("KMGTPE", start=1)},
}
_LARGEST = 2**63


def parse_quantity(text: object) -> Fraction:
    """Return the number that a quantity such as "500m", "2Gi" or "1e3" names; it is at least 0.

    Raises:
        HopsGpuError: it is no quantity.
    """
    match = _FORM.fullmatch(str(text).strip())
    if match is None or (match[3] is not None and match[3] not in _SUFFIXES):
        raise HopsGpuError(f"Kubernetes reports {str(text)[:40]!r} where a quantity is expected")
    factor = Fraction(10) ** int(match[2]) if match[2] else _SUFFIXES[match[3] or ""]
    return min(max(Fraction(match[1]) * factor, Fraction(0)), Fraction(_LARGEST))
