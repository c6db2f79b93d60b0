"""Checks for texts that shells between a submission and its processes would change or execute.

A shell script of the NodeManager starts a container. Properties that reach this script are refused
if a shell would change them. Expansions that users expect are allowed: `$NAME`, `${NAME}`,
`{{NAME}}`, `<LOG_DIR>`.

Sources: Hadoop's ContainerLaunch (`export NAME="value"`; `exec /bin/bash -c "command"`; before
that, it replaces `{{` by `$` and removes `}}`); Spark's YarnSparkHadoopUtil.escapeForShell (which
escapes `$`, `"` and `'`, but neither backticks nor backslashes), Client and ExecutorRunnable;
bin/spark-class.
"""

from __future__ import annotations

import locale
import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote

from hopsgpu.errors import ConfigError

# A text inside YARN's double quotes. Variables, and characters after a backslash, are intended.
_IN_QUOTES = re.compile(
    r"""\\[$`"] | \{\{\w+\}\} | \$[A-Za-z_] | \$\{[A-Za-z_](?=\w*([:%#/^,+=?-][^{}]*)?\})
    | (?P<bad> ` | " | \\\\ | \\\n | \\\Z | \$[($\[0-9!?#*@-] | \$\{ | \{\{ | \}\} )
    | .""",
    re.DOTALL | re.VERBOSE,
)
# A text inside Spark's single quotes, which are inside YARN's double quotes.
_IN_COMMAND = re.compile(
    r"\{\{\w+\}\} | (?P<bad> ` | \\[$\"\\`] | \{\{ | \}\} ) | .", re.DOTALL | re.VERBOSE
)
_IN_NAMES = re.compile(r"(?P<bad> [`\"$\\\n] | \{\{ | \}\} ) | .", re.DOTALL | re.VERBOSE)
_VARIABLE = re.compile(r"spark\.(?:executorEnv|yarn\.appMasterEnv)\.(?P<name>.*)", re.DOTALL)
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Quoted words of Java's options, as Spark's Utils.splitCommandString parses them.
_QUOTED = re.compile(r"\"(?P<double>(?:\\.|[^\"\\])*)\"?|'(?P<single>[^']*)'?", re.DOTALL)
# Environment variables of spark-submit and of a client-mode driver that Spark passes to containers.
_PASSED_VARIABLES = (
    "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON",
    "PYTHONPATH",
    "SPARK_DIST_CLASSPATH",
)
# The C library's names for the character set of the locale C.
_ASCII = frozenset(("ANSI_X3.4-1968", "US-ASCII"))
_EXPANDED = "which the shell that starts a container would change or execute"


def shell_findings(properties: Mapping[str, str]) -> list[str]:
    """Return the properties that a shell would change, each with a remedy."""
    # YARN's shells do not get the properties of a driver on this machine.
    is_client_mode = properties.get("spark.submit.deployMode") != "cluster"
    findings = []
    for name, value in properties.items():
        if is_client_mode and name.startswith("spark.driver."):
            continue
        variable = _VARIABLE.fullmatch(name)
        if variable and not _VARIABLE_NAME.fullmatch(variable["name"]):
            findings.append(f"{name}: a shell accepts no variable of this name; remove it")
        for pattern, text_of, expanded, mend in _RULES:
            if pattern.fullmatch(name):
                if bad := _first(expanded, text_of(value)):
                    findings.append(f"{name} has {bad!r}, {_EXPANDED}: {mend}")
                break
    return findings


def check_line(
    line: Sequence[str],
    properties: Mapping[str, str],
    arguments: Sequence[str],
    environ: Mapping[str, str],
) -> None:
    """Check that spark-submit and YARN pass everything on unchanged.

    Args:
        line: the arguments of spark-submit.
        arguments: the script's arguments that Spark writes into a command line of YARN.

    Raises:
        ConfigError: something would change; the message names it.
    """
    findings = shell_findings(properties)
    for name in _PASSED_VARIABLES:
        if bad := _first(_IN_QUOTES, environ.get(name, "")):
            findings.append(f"the variable {name} has {bad!r}, {_EXPANDED}: change it")
    for number, word in enumerate(arguments, start=1):
        if bad := _first(_IN_COMMAND, word):
            findings.append(f"argument {number} of the script has {bad!r}, {_EXPANDED}: change it")
    if any("\r" in word for word in line):
        findings.append("an option has a carriage return, which spark-submit drops: remove it")
    if locale.getencoding() in _ASCII and not all(map(str.isascii, line)):
        findings.append(
            "an option, the script's name or the path of a shipped file has non-ASCII characters,"
            " which Java does not accept in this locale: set LC_ALL=C.UTF-8"
        )
    if findings:
        raise ConfigError(f"the job cannot be submitted: {'; '.join(findings)}")


def _first(expanded: re.Pattern[str], text: str) -> str | None:
    """Return the first part of a text that a shell would change, or None."""
    return next((match["bad"] for match in expanded.finditer(text) if match["bad"]), None)


def _whole_value(value: str) -> str:
    return value


def _words(options: str) -> str:
    """Return Java's options without the quotes that Spark removes."""

    def inside(match: re.Match[str]) -> str:
        if match["double"] is None:
            return match["single"] or ""
        return re.sub(r"\\(.)", r"\1", match["double"], flags=re.DOTALL)

    return _QUOTED.sub(inside, options)


def _names(entries: str) -> str:
    """Return the names that shipped files, and the links to them, have in a container."""
    names = []
    for entry in entries.split(","):
        path, _, alias = entry.strip().partition("#")
        name = path.rpartition("/")[2]
        names += [unquote(name) if ":" in path else name, unquote(alias)]
    return " ".join(names)


# Each rule: the properties, the part of a value that a shell reads, what the shell would change in
# that part, and the remedy.
_RULES: tuple[tuple[re.Pattern[str], Callable[[str], str], re.Pattern[str], str], ...] = (
    (
        _VARIABLE,
        _whole_value,
        _IN_QUOTES,
        "ranks receive variables through env_vars=, which no shell reads; remove it",
    ),
    (
        re.compile(r"spark\.(?:executor|driver|yarn\.am)\.extra(?:ClassPath|LibraryPath)"),
        _whole_value,
        _IN_QUOTES,
        "leave it out",
    ),
    (
        re.compile(r"spark\.(?:executor|driver|yarn\.am)\.(?:extra|default)JavaOptions"),
        _words,
        _IN_COMMAND,
        "leave it out",
    ),
    (
        # SparkConf.isExecutorStartupConf: properties that an executor needs to reach the driver.
        re.compile(r"spark\.(?:auth|rpc|network|ssl).*|spark\..*\.port|spark\.port\..*"),
        _whole_value,
        _IN_COMMAND,
        "leave it out",
    ),
    (
        re.compile(r"spark\.yarn\.dist\.\w+|spark\.(?:jars|files|archives|submit\.pyFiles)"),
        _names,
        _IN_NAMES,
        "rename the file",
    ),
)
