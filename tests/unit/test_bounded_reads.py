"""Each read in the package has a bound, unless only the user or the system writes the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hopsgpu.core.bounded_reads import read_end, read_file
from hopsgpu.errors import StoreError
from hopsgpu.storage.lake import LakePath

ROOT = Path(__file__).parents[2]
# Calls that read to the end, and those that do so without an argument.
WHOLE = {"read_bytes", "read_text", "readall", "readlines"}
WHOLE_WITHOUT_SIZE = {"read", "readline"}

KERNEL = "the kernel's files have bounds"
INSTALLED = "a part of an installation"
CONFIGURATION = "the administrator's or the user's configuration"
OWN = "written by this user's processes in a directory of their own"
CODE = "the user's own code, which is shipped"
PIPE = "a pipe from a process of this user"
NO_FILE = "not a file"
# Why a module, or all modules below a directory, may read without a bound.
EXEMPT = {
    "agent/addresses.py": KERNEL,
    "agent/daemon_client.py": PIPE,
    "agent/fork_safety.py": KERNEL,
    "agent/oom_kills.py": KERNEL,
    "agent/orphans.py": KERNEL,
    "agent/process_daemon.py": OWN,
    "agent/rank_group.py": NO_FILE,
    "agent/rank_process.py": OWN,
    "agent/shared_memory.py": KERNEL,
    "artifacts/checkpoint_upload.py": OWN,
    "artifacts/log_dir_upload.py": OWN,
    "artifacts/models.py": "the user's own file, which is published",
    "backends/local/container.py": PIPE,
    "backends/spark/job_file.py": CODE,
    "backends/spark/package_archive.py": INSTALLED,
    "backends/spark/pyspark_archives.py": OWN,
    "backends/spark/spark_versions.py": INSTALLED,
    "cluster_managers/yarn/node_manager.py": CONFIGURATION,
    "core/own_log.py": OWN,
    "devcluster/": OWN,
    "doctor/facts.py": NO_FILE,
    "gpu/container_gpus.py": OWN,
    "gpu/node/health_check.py": KERNEL,
    "gpu/node/lease_keeper.py": KERNEL,
    "gpu/script_archive.py": INSTALLED,
    "launcher/scripts.py": CODE,
    "linux.py": KERNEL,
    "monitoring/exposition.py": INSTALLED,
    "monitoring/observation.py": NO_FILE,
    "packaging/": CODE,
    "rank/context.py": OWN,
    "rank/rank_script.py": CODE,
    "serving/export.py": "the export that the user has just made",
    "serving/export_layout.py": INSTALLED,
    "serving/server_files/": "a server's own files; its library reads all of the model anyway",
    "storage/hadoop_tokens.py": CONFIGURATION,
    "storage/hdfs.py": "the reader itself, which `LakePath.read` bounds",
    "storage/kerberos.py": CONFIGURATION,
    "storage/spark_defaults.py": CONFIGURATION,
    "storage/umask.py": KERNEL,
}


def _unbounded(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        name = node.func.attr
        is_sized = bool(node.args or node.keywords)
        if name in WHOLE or (name in WHOLE_WITHOUT_SIZE and not is_sized):
            yield node.lineno, ast.unparse(node)


def _findings() -> dict[str, list[str]]:
    by_module = {}
    for file in sorted((ROOT / "hopsgpu").rglob("*.py")):
        name = file.relative_to(ROOT / "hopsgpu").as_posix()
        if calls := [f"{name}:{line}: {call}" for line, call in _unbounded(file.read_text())]:
            by_module[name] = calls
    return by_module


def test_no_module_reads_others_files_without_a_bound() -> None:
    reads = [
        call
        for name, calls in _findings().items()
        if not any(name.startswith(exempt) for exempt in EXEMPT)
        for call in calls
    ]
    assert not reads, "\n".join(
        ["use LakePath.read(max_bytes) or core.bounded_reads, or say why not:", *reads]
    )


def test_no_exemption_is_left_over() -> None:
    names = _findings()
    assert [e for e in EXEMPT if not any(name.startswith(e) for name in names)] == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("with lake.open() as file:\n    file.read()", 1),
        ("json.loads((run / RECORD).read())", 1),
        ("path.read_text(encoding='utf-8')", 1),
        ("file.readline()", 1),
        ("file.read(MAX_RECORD_BYTES)", 0),
        ("read_file(path)", 0),
    ],
)
def test_the_rule_finds_unbounded_reads(code: str, count: int) -> None:
    assert len(list(_unbounded(code))) == count


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    file = tmp_path / "record"
    file.write_bytes(b"x" * 10)
    lake = LakePath(f"file://{file}")
    assert read_file(file, 10) == lake.read(10) == b"x" * 10
    assert read_end(file, 4) == "xxxx"
    for read in (lambda: read_file(file, 9), lambda: lake.read(9)):
        with pytest.raises(StoreError, match=r"more than the 9 bytes .* check who") as refusal:
            read()
        assert refusal.value.kind == "damaged" and str(file) in str(refusal.value)
