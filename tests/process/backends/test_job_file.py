"""The file that spark-submit runs: the script is started by it as by `python script.py …`."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.backends.spark.job_file import job_file
from hopsgpu.backends.spark.submit_arguments import pack

SHOWS = """
import json, os, sys, __main__
assert __main__ is sys.modules["__main__"] and __spec__ is None
names = [name for name in vars(__main__) if not name.startswith("__")]
words = [os.fsencode(word).decode("latin-1") for word in sys.argv]
print(json.dumps([words, __file__, sys.path[0], names[:3]]))
"""
ARGUMENTS = [
    '{"a": {"b": 1}}',
    "{{PWD}} <LOG_DIR> <CPS>",
    "`id` $(id) $HOME \\$HOME a\\\\b \\",
    "",
    "two\nlines\r\n",
    "é 漢 \udcff",
    "--conf",
    "-",
    'it\'s "q" * ~ ; | & # %41',
    "x" * 100_000,
]
NAMES = [
    "job.py",
    "a b.py",
    'it\'s "q".py',
    "größe.py",
    "-x.py",
    "a;$(id)`id`{{PWD}}.py",
    "n\nl.py",
]


def ran(file: Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environ}
    return subprocess.run(
        [sys.executable, str(file)], cwd=cwd, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_source", [False, True])
def test_a_script_gets_its_name_and_arguments_whole(
    tmp_path: Path, name: str, has_source: bool
) -> None:
    project, container = tmp_path / "my project", tmp_path / "container"
    project.mkdir()
    container.mkdir()
    script = project / name
    script.write_text(SHOWS)
    own, content = job_file(script, ARGUMENTS, has_source=has_source)
    # Nothing that a shell, Spark, YARN or a locale knows.
    assert re.fullmatch(r"job-[0-9a-f]+\.py", own) and content.isascii()
    (tmp_path / own).write_bytes(content)
    if has_source:
        script.unlink()
        script = container / name
    found = ran(tmp_path / own, container, LC_ALL="C")
    assert found.returncode == 0, found.stderr
    words, file, path, names = json.loads(found.stdout)
    assert words == [os.fsencode(w).decode("latin-1") for w in (str(script), *ARGUMENTS)]
    assert (file, path, names) == (str(script), str(script.parent), ["json", "os", "sys"])


def test_many_arguments(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import sys; print(len(sys.argv), sys.argv[-1])")
    own, content = job_file(tmp_path / "job.py", list(map(str, range(1000))), has_source=True)
    (tmp_path / own).write_bytes(content)
    assert ran(tmp_path / own, tmp_path).stdout == "1001 999\n"


def test_a_scripts_end_and_its_traceback_are_its_own(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("raise ValueError('no')\n")
    own, content = job_file(script, [], has_source=False)
    (tmp_path / own).write_bytes(content)
    found = ran(tmp_path / own, tmp_path)
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        "Traceback (most recent call last):",
        f'  File "{script}", line 1, in <module>',
        "    raise ValueError('no')",
        "ValueError: no",
    ]
    script.write_text("import sys; sys.exit(7)\n")
    assert ran(tmp_path / own, tmp_path).returncode == 7
    script.unlink()
    assert ran(tmp_path / own, tmp_path).returncode == 2


def test_a_shipped_script_does_not_write_through_a_link_of_its_name(tmp_path: Path) -> None:
    """As YARN makes of files that are shipped."""
    container, others = tmp_path / "container", tmp_path / "of-others.py"
    container.mkdir()
    others.write_text("raise SystemExit(3)\n")
    (container / "job.py").symlink_to(others)
    (tmp_path / "job.py").write_text("print('mine')\n")
    own, content = job_file(tmp_path / "job.py", [], has_source=True)
    (tmp_path / own).write_bytes(content)
    assert ran(tmp_path / own, container).stdout == "mine\n"
    assert others.read_text() == "raise SystemExit(3)\n"


def test_one_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("")
    own, content = job_file(tmp_path / "job.py", ["x" * 200_000], has_source=True)
    (tmp_path / own).write_bytes(content)
    found = ran(tmp_path / own, tmp_path)
    assert found.returncode == 1
    assert found.stderr == "hopsgpu: 'job.py' cannot be started: Argument list too long\n"


def test_what_a_job_holds_is_its_owners_to_read(tmp_path: Path) -> None:
    packed = pack(tmp_path / "cache", job=("job-1.py", b"x"))
    assert packed.job is not None and stat.S_IMODE(packed.job.stat().st_mode) == 0o600
    os.utime(packed.job, (0, 0))
    pack(tmp_path / "cache")
    assert not packed.job.exists()
