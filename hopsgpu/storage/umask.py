"""Permissions of new files on HDFS: the client applies the umask, not the NameNode."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_conf import HadoopConf

_SETTING = "fs.permissions.umask-mode"
_DEFAULT = 0o022
_SYMBOLIC = re.compile(r"([ugoa]*)([=+-])([rwx]*)")
_SHIFTS = {"u": 6, "g": 3, "o": 0}
_BITS = {"r": 4, "w": 2, "x": 1}


def creation_mask(environment: Mapping[str, str]) -> int:
    """Return the permission bits that new files and directories do not get.

    The bits are `fs.permissions.umask-mode` of the Hadoop configuration that the environment names.
    If the property is missing or invalid, the bits are this process's umask.
    """
    setting = _setting(environment)
    mask = None if setting is None else parse_mask(setting)
    return _process_mask() if mask is None else mask


def parse_mask(setting: str) -> int | None:
    """Return the bits of an octal ("027") or symbolic ("u=rwx,g=rx,o=") setting; else None."""
    text = setting.strip()
    if re.fullmatch(r"[0-7]{1,4}", text):
        return int(text, 8) & 0o777
    mask = _DEFAULT
    for clause in text.split(","):
        match = _SYMBOLIC.fullmatch(clause.strip())
        if match is None:
            return None
        who, sign, what = match.groups()
        bits = sum(_BITS[letter] for letter in set(what))
        for letter in "ugo" if not who or "a" in who else who:
            shift = _SHIFTS[letter]
            allowed = {
                "=": bits,
                "+": ~mask >> shift & 7 | bits,
                "-": ~mask >> shift & 7 & ~bits,
            }[sign]
            mask = mask & ~(7 << shift) | (7 & ~allowed) << shift
    return mask


def _setting(environment: Mapping[str, str]) -> str | None:
    if "HADOOP_CONF_DIR" not in environment and "HADOOP_HOME" in environment:
        # hdfs-native's rule.
        environment = {**environment, "HADOOP_CONF_DIR": f"{environment['HADOOP_HOME']}/etc/hadoop"}
    try:
        return HadoopConf.load_hdfs(environment).get(_SETTING)
    except ConfigError:  # the client reports the unreadable file
        return None


def _process_mask() -> int:
    """Return this process's umask, from /proc: os.umask would change it for all threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return _DEFAULT
