"""Writes constraints.txt: `make constraints`.

Each package has its version, the digests of all its files, and below these the sets that it is in:
the extras that the arguments name, and hopsgpu alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence

ALONE = "hopsgpu"
# The oldest one that all packages run on: newer ones have wheels for the same versions.
_PYTHON = "3.11.5"
# [build-system] requires it, and `pip install --no-build-isolation` takes it from the environment.
_BUILD = "setuptools>=77"
_UV = (
    *("uv", "pip", "compile", "--quiet", "--universal", "--python-version", _PYTHON),
    *("--fork-strategy", "fewest", "--no-annotate", "--no-header"),
)
_HEADER = """\
# Made by `make constraints`, for Python from {} on. The line below a package names the
# sets that it is in: the extras, and hopsgpu alone.
"""


def entries_of(text: str) -> list[str]:
    """Return the packages of a file of requirements, each with its digests and remarks."""
    return re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", text, re.MULTILINE | re.DOTALL)


def _resolve(extras: Sequence[str], *options: str) -> list[str]:
    chosen = [f"--extra={extra}" for extra in extras if extra != ALONE]
    argv = [*_UV, "--python", sys.executable, *chosen, *options, "setup.py", "-"]
    completed = subprocess.run(
        argv, input=_BUILD, text=True, check=True, stdout=subprocess.PIPE, timeout=1800
    )
    return entries_of(completed.stdout)


def main(extras: Sequence[str]) -> None:
    packages = _resolve(extras, "--generate-hashes")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{package.split()[0]}\n" for package in packages)
        pins.flush()
        sets = {
            one: {package.split()[0] for package in _resolve([one], "--constraints", pins.name)}
            for one in (ALONE, *extras)
        }
    print(_HEADER.format(_PYTHON), end="")
    for package in packages:
        names = [one for one, members in sets.items() if package.split()[0] in members]
        print(f"{package}    # for {' '.join(names)}")


if __name__ == "__main__":
    main(sys.argv[1:])
