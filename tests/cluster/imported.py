"""What ranks of test_python_env.py run; there is no pytest in their environment."""

from __future__ import annotations

import sys

import hopsgpu


def what_is_imported() -> dict[str, object]:
    import travelled
    import xxhash

    return {
        "value": travelled.VALUE,
        "xxhash": xxhash.__version__,
        "file": travelled.__file__,
        "host": hopsgpu.context().host,
        "executable": sys.executable,
    }
