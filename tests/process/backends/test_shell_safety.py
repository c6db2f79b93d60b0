"""What shells of the nodes would change or execute: refused, with the property; the rest is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hopsgpu.backends.spark.shell_safety import check_line, shell_findings
from hopsgpu.errors import ConfigError

CLUSTER = {"spark.submit.deployMode": "cluster"}
VARIABLE, MASTER = "spark.executorEnv.A", "spark.yarn.appMasterEnv.A"
JAVA = "spark.executor.extraJavaOptions"


@pytest.mark.parametrize(
    "value",
    [
        "/opt/cuda/lib64:$LD_LIBRARY_PATH",
        "${HOME}/x",
        "{{PWD}}/a<CPS>{{PWD}}/b",
        "<LOG_DIR>/x",
        r"a\$b \"q\" \`",
        "it's 100%! a;b|c&d e~*?",
        r"x\y",
        "costs 5 $",
        "/a${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}",
        "two\nlines",
        "é",
        "",
        "{{PWD}}}",
    ],
)
def test_a_variable_may_have_what_stays_and_what_is_meant_to_be_expanded(value: str) -> None:
    assert shell_findings({VARIABLE: value, MASTER: value}) == []


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        ("a`id`", "`"),
        ("$(id)", "$("),
        ("$[1]", "$["),
        ("${X:-$(id)}", "$("),
        ("pa$$word", "$$"),
        ("a$1", "$1"),
        ("${1}", "${"),
        ("${a", "${"),
        ("${a b}", "${"),
        ('{"a": 1}', '"'),
        ("a}}b", "}}"),
        ("{{a b}}", "{{"),
        (r"a\\b", r"\\"),
        ("end\\", "\\"),
        ("a\\\nb", "\\\n"),
    ],
)
def test_a_variable_that_a_shell_would_change_is_refused(value: str, bad: str) -> None:
    for name in (VARIABLE, MASTER, "spark.executor.extraClassPath"):
        (finding,) = shell_findings({name: value})
        assert finding.startswith(f"{name} has {bad!r}, which the shell that starts a container")
    assert "env_vars=" in shell_findings({VARIABLE: value})[0]


def test_the_rule_for_variables_is_the_shells(tmp_path: Path) -> None:
    """Whatever is let through arrives as it is, or has a variable in it."""
    letters = ["\\", "$", "`", '"', "a", "{", "}", "(", "1", "\n", "'"]
    texts = [a + b + c for a in letters for b in letters for c in letters]
    kept = [
        text
        for text in texts
        if not shell_findings({VARIABLE: text})
        and not re.search(r"\$\{?a", text)
        and not any(escape in text for escape in (r"\$", r"\"", r"\`"))
    ]
    assert len(kept) > 400
    # As the NodeManager writes it.
    lines = "".join(f'export V{n}="{text}"\n' for n, text in enumerate(kept))
    shown = "".join(f'printf "%s\\0" "$V{n}"\n' for n in range(len(kept)))
    (tmp_path / "launch.sh").write_text(lines + shown)
    ran = subprocess.run(
        ["bash", str(tmp_path / "launch.sh")], capture_output=True, text=True, check=True
    )
    assert ran.stdout.split("\0")[:-1] == kept and not ran.stderr


@pytest.mark.parametrize(
    "value",
    [
        "-Xlog:gc:<LOG_DIR>/gc.log -Da={{PWD}}/x",
        """-Da="x \\"y\\"" -Db='$HOME' -Dc=a\\b -Dd="a\\\\d+" -De=it's""",
        "-Dspark.app={{APP_ID}}",
    ],
)
def test_javas_options_may_have_what_spark_quotes(value: str) -> None:
    assert shell_findings({JAVA: value}) == []


@pytest.mark.parametrize(
    ("value", "bad"),
    [
        ("-Da=`id`", "`"),
        ("-Da='`id`'", "`"),
        (r"-Da=\$HOME", r"\$"),
        ("""-Da='\\"'""", r"\""),
        ("-Da={{{}}}", "{{"),
        ('-Da={"b":{"c":1}}', "}}"),
    ],
)
def test_javas_options_that_get_past_sparks_quotes_are_refused(value: str, bad: str) -> None:
    (finding,) = shell_findings({JAVA: value})
    assert finding.startswith(f"{JAVA} has {bad!r}")
    # Of a driver only where YARN starts it.
    driver = {"spark.driver.extraJavaOptions": value}
    assert shell_findings(driver) == []
    assert len(shell_findings({**driver, **CLUSTER})) == 1


def test_other_ways_into_a_shell() -> None:
    refused = {
        "spark.executorEnv.A B": "1",
        "spark.yarn.appMasterEnv.A;id": "1",
        "spark.ssl.keyStore": "/a`b",
        "spark.yarn.dist.files": "/a/b.txt,file:///c/d%60e.txt",
        "spark.yarn.dist.archives": 'hdfs:///a.zip#"x"',
        "spark.jars": "/a/$b.jar",
    }
    findings = shell_findings(refused)
    assert [finding.partition(" has ")[0].partition(": ")[0] for finding in findings] == [*refused]
    accepted = {
        "spark.yarn.dist.files": "/a`dir/b c.txt,file:///it's.txt#größe;&|.txt",
        # Spark's own files carry these.
        "spark.app.name": '`id` {{PWD}} "',
        "spark.x": "`id`",
        "spark.yarn.queue": "`id`",
    }
    assert shell_findings(accepted) == []


def test_what_spark_submit_would_not_hand_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check_line(["--name", "é", "a\nb"], {}, ["it's $HOME"], {"PYTHONPATH": "/a:/b"})
    for words, arguments, environ, said in (
        (["a\rb"], [], {}, "carriage return"),
        ([], ['{"a": {"b": 1}}'], {}, "argument 1 of the script has '}}'"),
        ([], [], {"PYSPARK_PYTHON": "/a`b"}, "the variable PYSPARK_PYTHON has '`'"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_line(words, {}, arguments, environ)
    with pytest.raises(ConfigError, match="spark.executorEnv.A has '`'"):
        check_line([], {VARIABLE: "`"}, [], {})


@pytest.mark.parametrize(("locale", "refused"), [("C", True), ("C.UTF-8", False)])
def test_letters_that_java_would_lose(locale: str, refused: bool) -> None:
    code = (
        "from hopsgpu.backends.spark.shell_safety import check_line\n"
        "check_line(['gr\\xf6\\xdfe'], {}, [], {})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "LC_ALL": locale},
        capture_output=True,
        text=True,
    )
    assert (ran.returncode != 0) is refused
    assert ("set LC_ALL=C.UTF-8" in ran.stderr) is refused
