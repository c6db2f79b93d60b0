"""The doctor's section about Kerberos."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hopsgpu.doctor.kerberos_checks import (
    Credentials,
    check_identity,
    check_protection,
    check_web,
)
from hopsgpu.doctor.report import CheckState
from hopsgpu.storage.kerberos import KerberosTicket

NOW = 1_795_000_000.0
RM = "http://rm:8088"
FINE = Credentials(
    "", "alice", KerberosTicket("alice@R", NOW + 36_000, NOW + 600_000), "", {RM: True}, True
)


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (FINE, CheckState.OK, "alice (alice@R), ticket until 20"),
        (replace(FINE, keytab="/k"), CheckState.OK, "then new ones from the keytab /k"),
        (replace(FINE, ticket=KerberosTicket("a@R", NOW + 36_000)), CheckState.OK, "not renewable"),
        (
            replace(FINE, ticket=KerberosTicket("a@R", NOW + 60)),
            CheckState.WRONG,
            "ends within the hour",
        ),
        (
            replace(FINE, problem="there is no Kerberos ticket: run kinit"),
            CheckState.WRONG,
            "kinit",
        ),
        (replace(FINE, ticket=None), CheckState.UNKNOWN, "klist is not installed"),
    ],
)
def test_identity(found: Credentials, state: CheckState, words: str) -> None:
    check = check_identity(found, NOW)
    assert check.state == state and words in check.seen, check


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (FINE, CheckState.OK, f"{RM} requires Kerberos: a driver in YARN"),
        (
            replace(FINE, has_client=False),
            CheckState.WRONG,
            f"{RM} requires Kerberos, and requests-gs",
        ),
        (
            replace(FINE, spnego={RM: False}, has_client=False),
            CheckState.OK,
            "requires no Kerberos",
        ),
        (replace(FINE, spnego={RM: None}), CheckState.UNKNOWN, "no ResourceManager answers"),
    ],
)
def test_web_addresses(found: Credentials, state: CheckState, words: str) -> None:
    check = check_web(found)
    assert check.state == state and words in check.seen, check


@pytest.mark.parametrize(
    ("settings", "state", "words"),
    [
        ({}, CheckState.OK, "RPC: authentication, blocks: none"),
        ({"dfs.data.transfer.protection": "privacy"}, CheckState.UNKNOWN, "ten times slower"),
        ({"dfs.encrypt.data.transfer": "true"}, CheckState.UNKNOWN, "ten times slower"),
        (
            {
                "dfs.data.transfer.protection": "privacy",
                "hadoop.rpc.protection": "privacy",
                "dfs.encrypt.data.transfer.cipher.suites": "AES/CTR/NoPadding",
            },
            CheckState.OK,
            "RPC: privacy, blocks: privacy (AES/CTR/NoPadding)",
        ),
    ],
)
def test_protection(settings: dict[str, str], state: CheckState, words: str) -> None:
    check = check_protection(settings.get)
    assert check.state == state and words in check.seen, check
