"""The file that spark-submit runs in place of a user's script: it starts the script unchanged.

Spark and YARN write a script's name and arguments into shell scripts of the node. These scripts
expand `{{PWD}}` and execute backticks. spark-submit drops carriage returns, and Java drops
characters that its locale lacks. So Spark gets only this file, whose name is harmless. The script's
name and arguments are inside, as bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

# The process becomes `python script.py arguments`: then this file is not on the script's stack or
# in its modules, and does not receive its signals.
_TEXT = '''\
"""Starts a script with its arguments; written by hopsgpu for spark-submit."""

import os
import sys

SCRIPT = {script!r}
ARGUMENTS = {arguments}
# The content of a script that is not on the machine where it runs; else None.
SOURCE = {source!r}

path = SCRIPT
try:
    if SOURCE is not None:
        path = os.path.join(os.getcwdb(), SCRIPT)
        # A rename replaces a link of that name; a write would follow it.
        with open(path + b".new", "xb") as file:
            file.write(SOURCE)
        os.replace(path + b".new", path)
    os.execv(sys.executable, [os.fsencode(sys.executable), path, *ARGUMENTS])
except OSError as error:
    sys.exit("hopsgpu: %r cannot be started: %s" % (os.fsdecode(SCRIPT), error.strerror))
'''


def job_file(script: Path, arguments: Sequence[str], *, has_source: bool) -> tuple[str, bytes]:
    """Return the name of the file, which depends on the content, and the content.

    Args:
        has_source: whether the file contains the script, for the working directory of a container
            (cluster mode); else the script runs where it is.

    Raises:
        OSError: the script cannot be read.
    """
    words = ", ".join(repr(os.fsencode(word)) for word in arguments)
    content = _TEXT.format(
        script=os.fsencode(script.name if has_source else script.absolute()),
        arguments=f"[{words}]",
        source=script.read_bytes() if has_source else None,
    ).encode()
    return f"job-{hashlib.sha256(content).hexdigest()[:20]}.py", content
