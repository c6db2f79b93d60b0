"""Texts for records, logs and screens, without the secrets that they may contain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REDACTED = "(redacted)"
# Parts of the names of variables and arguments whose values are secret.
_SECRET_NAME = re.compile(
    r"secret|token|passw|pwd|passphrase|credential|auth|key|jwt|bearer|webhook"
    r"|connection_?string|conn_?str|(?<![a-z])(?:dsn|sas)(?![a-z])",
    re.IGNORECASE,
)
# A password may contain "/", "?" and "#"; a number before "/" or "," is a port.
_PASSWORD = re.compile(
    r"""(?<=://)[^/?#@\s:'"]{0,200}:(?!\d{1,5}(?:[/?#,\s'"]|$))[^\s'"]{0,1000}@"""
)
# In URLs of other kinds, such as abfss://container@account, the part before "@" is no secret.
_USER = re.compile(r"""(?<=ttp://|tps://)[^/?#@\s'"]{1,1000}@""", re.IGNORECASE)
# Parameters of signed URLs, and fields of connection strings.
_PARAMETER = re.compile(
    r"""((?<![a-z])(?:sig|[\w.-]{0,40}(?:signature|token|secret|password|passwd|pwd|credential"""
    r"""|delegation|(?:account|access|api|shared|private)[\w-]{0,20}key))=)[^&;,\s'"]+""",
    re.IGNORECASE,
)
_WEBHOOK = re.compile(
    r"""(https?://(?:[^/\s'"]{0,200}hook[^/\s'"]{0,200}|[^\s'"]{1,200}hooks?))/[^\s'"]+""",
    re.IGNORECASE,
)
# Tokens of GitHub, GitLab, Hugging Face, OpenAI and Slack, and JSON web tokens.
_TOKEN = re.compile(r"(?<!\w)(?:gh[opsur]_|github_pat_|glpat-|hf_|sk-|xox[abeprs]-|eyJ)[\w.-]{16,}")


def redact(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables without values whose names look secret, and without secrets in others."""
    return {
        name: REDACTED if _SECRET_NAME.search(name) else without_secrets(value)
        for name, value in variables.items()
    }


def without_secrets(text: str) -> str:
    """Return a text without what looks like a user of a URL, a signed URL, a webhook or a token."""
    if "://" in text:
        text = _PASSWORD.sub(f"{REDACTED}@", text)
        text = _USER.sub(f"{REDACTED}@", text)
        text = _WEBHOOK.sub(rf"\1/{REDACTED}", text)
    if "=" in text:
        text = _PARAMETER.sub(rf"\1{REDACTED}", text)
    return _TOKEN.sub(REDACTED, text)


def redact_json(value: Any) -> Any:
    """Return a JSON value whose texts, other than the names in it, have no secrets."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {name: redact_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_json(item) for item in value]
    return value
