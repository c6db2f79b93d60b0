"""Finds a JDK that Spark and Hadoop can run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.errors import ClusterError

ACCEPTED = (17, 21)
# Several JVMs start at once on a few cores, and mostly compile. With only the quick compiler, two
# executors are ready after 7 s instead of 10 s, and a driver starts in half the time. Netty
# searches for Java's flight recorder at its start, which takes as long as loading 1,000 classes.
QUICK = (
    "-XX:TieredStopAtLevel=1",
    "-XX:+UseSerialGC",
    "-Xshare:auto",
    "-Dio.netty.jfr.enabled=false",
)
_ASK = ("-XshowSettings:properties", "-version")
_INSTALL = "install a JDK 17 or 21 (Debian and Ubuntu: apt install openjdk-17-jdk-headless)"


@dataclass(frozen=True)
class Java:
    home: Path
    version: int

    @property
    def binary(self) -> Path:
        return self.home / "bin" / "java"

    @property
    def compiler(self) -> Path:
        """A JDK has this file, a JRE does not."""
        return self.home / "bin" / "javac"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the first accepted JDK of JAVA_HOME and the PATH.

    Raises:
        ClusterError: neither is a JDK 17 or 21; the message lists the versions found, and says
            what to install.
    """
    environ = os.environ if environ is None else environ
    seen: list[str] = []
    for origin, binary in _candidates(environ):
        java = _inspect(binary)
        if java is None:
            seen.append(f"{origin} has no working java ({binary})")
        elif java.version not in ACCEPTED:
            seen.append(f"{origin} has Java {java.version} ({java.home})")
        elif not java.compiler.is_file():
            seen.append(f"{origin} has a Java {java.version} without javac ({java.home})")
        else:
            return java
    versions = "; ".join(seen) or "JAVA_HOME is not set and there is no java on the PATH"
    raise ClusterError(f"{versions}: {_INSTALL} and set JAVA_HOME to it")


def java_of_spark(environ: Mapping[str, str]) -> tuple[str, Path, Java | None] | None:
    """Return the Java that Spark's scripts start: JAVA_HOME's if that is set, else the PATH's.

    Returns:
        The setting that names the Java, the binary, and the Java, which is None if it does not run.
        None if there is no Java.
    """
    for origin, binary in _candidates(environ):
        return origin, binary, _inspect(binary)
    return None


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(environ["JAVA_HOME"]) / "bin" / "java"
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path:
        yield "the PATH", Path(on_path)


def _inspect(binary: Path) -> Java | None:
    """Return the Java of a binary as it describes itself; None if it does not run."""
    # Options in JDK_JAVA_OPTIONS or JAVA_TOOL_OPTIONS could prevent the start of a working java.
    quiet = {k: v for k, v in os.environ.items() if not re.fullmatch(r"J\w*_OPTIONS", k)}
    try:
        completed = subprocess.run(
            [str(binary), *_ASK], env=quiet, capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    output = completed.stderr + completed.stdout
    version = re.search(r"java\.specification\.version = (?:1\.)?(\d+)", output)
    home = re.search(r"java\.home = (.+)", output)
    if completed.returncode or not version or not home:
        return None
    return Java(Path(home.group(1).strip()), int(version.group(1)))


def main() -> int:
    """Print what to install if no Java is accepted; `make` calls this before it downloads."""
    try:
        find_java()
    except ClusterError as error:
        print(f"hopsgpu: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
