"""Compares the daemons' jars with the digests that hopsgpu knows.

The list has the jars of the tested releases, in the form of the program sha256sum. For other
releases there are no digests, and the repository that Spark's resolver downloads from is trusted.
"""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path

from hopsgpu.errors import ClusterError

_FILE = "daemon_jars.sha256"


def known_digests(packages: Iterable[str]) -> Mapping[str, str]:
    """Return the digests of all known jars by file name; none if a package is not known.

    Args:
        packages: Maven coordinates, group:name:version.
    """
    text = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    pairs = [line.split() for line in text.splitlines()]
    digests = {name: digest for digest, name in pairs}
    # The resolver's file names.
    files = ("{}_{}-{}.jar".format(*package.split(":")) for package in packages)
    return digests if all(file in digests for file in files) else {}


def check_jars(directory: Path, digests: Mapping[str, str], advice: str) -> None:
    """Check all jars of a directory.

    Args:
        digests: the result of `known_digests`.
        advice: the end of the message for a wrong jar.

    Raises:
        ClusterError: a jar is not known, or has another content.
    """
    if not digests:
        return
    for jar in sorted(directory.glob("*.jar")):
        with jar.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        expected = digests.get(jar.name)
        if expected is None:
            raise ClusterError(f"{jar} is none of the jars of this Hadoop: {advice}")
        if digest != expected:
            raise ClusterError(
                f"{jar} has the SHA-256 digest {digest}, and hopsgpu knows {expected}: {advice}"
            )
