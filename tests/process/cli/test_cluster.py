"""The command line: options, one-line errors, and an environment that any shell can take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hopsgpu import devcluster as library
from hopsgpu.cli.cluster import exports
from hopsgpu.cli.main import main

WEIRD = [
    "plain",
    "with space",
    "it's",
    'quo"te',
    "$HOME `id` $(id)",
    "a;b|c&d",
    "new\nline",
    "*?~!",
    "",
]


def test_the_environment_survives_a_shell(tmp_path: Path) -> None:
    environ = {f"V{i}": value for i, value in enumerate(WEIRD)}
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    script = f'eval "$1"; exec "$2" -c "{show}"'
    for shell in ("sh", "bash"):
        ran = subprocess.run(
            [shell, "-c", script, "x", exports(environ), sys.executable],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        seen = json.loads(ran.stdout)
        assert {name: seen[name] for name in environ} == environ


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["up", "--nodes", "0"], "nodes must be an integer from 1 to 32, not 0"),
        (["up", "--gpus-per-node", "99"], "gpus_per_node must be an integer"),
        (["up", "--conf", "/none.yaml"], "cannot read /none.yaml"),
        (["up", "--standalone", "--docker"], "leave out --standalone or --docker"),
        (["up", "--master-ha"], "--standalone --master-ha"),
        (["env"], "no cluster runs in"),
    ],
)
def test_an_error_is_one_line_and_no_traceback(tmp_path: Path, args: list[str], words: str) -> None:
    ran = CliRunner().invoke(main, ["cluster", *args, "--dir", str(tmp_path)])
    assert ran.exit_code == 1
    assert ran.stdout == ""
    assert ran.stderr.startswith("hopsgpu: ")
    assert words in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_the_status_of_nothing(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["cluster", "status", "--dir", str(tmp_path)])
    assert (ran.exit_code, ran.stdout) == (1, f"no cluster runs in {tmp_path}\n")
    ran = CliRunner().invoke(main, ["cluster", "status", "--json", "--dir", str(tmp_path)])
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["running"] is False


def test_options_reach_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(library, "up", lambda *a, **k: calls.append((a, k)))
    args = ["--dir", "d", "--nodes", "3", "--gpus-per-node", "1", "--conf", "c.yaml"]
    args += [
        "--hadoop",
        "3.3.6",
        "--kerberos",
        "--https",
        "--namenode-ha",
        "--privacy",
        "--token-lifetimes",
        "60",
        "300",
        "--preemption",
        "--docker",
        "--mig",
        "1g.10gb:7",
        "--standalone",
        "--master-ha",
        "--timeout",
        "600",
    ]
    assert CliRunner().invoke(main, ["cluster", "up", *args]).exit_code == 0
    assert CliRunner().invoke(main, ["cluster", "up"]).exit_code == 0
    given = {
        "conf": "c.yaml",
        "gpus_per_node": 1,
        "hadoop": "3.3.6",
        "kerberos": True,
        "nodes": 3,
        "privacy": True,
    }
    given |= {"simple_web": None, "token_lifetimes": (60.0, 300.0)}
    given |= {"https": True, "namenode_ha": True, "resourcemanager_ha": None, "preemption": True}
    given |= {"timeout": 600.0, "has_docker": True, "mig": "1g.10gb:7"}
    given |= {"is_standalone": True, "has_master_ha": True, "is_kubernetes": None}
    for _, options in calls:
        assert isinstance(options, dict) and options.pop("say")
    # Of what is not given, that of a cluster that runs is kept.
    assert calls == [(("d",), given), ((None,), dict.fromkeys(given))]


@pytest.mark.parametrize("command", ["up", "down", "status", "env"])
def test_every_command_explains_itself(command: str) -> None:
    ran = CliRunner().invoke(main, ["cluster", command, "--help"])
    assert ran.exit_code == 0
    assert "--dir" in ran.stdout


def test_the_command_line_starts_light() -> None:
    check = (
        "import sys; import hopsgpu.cli.main; "
        "print([m for m in ('pyspark', 'requests', 'yaml', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
