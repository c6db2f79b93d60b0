"""Tickets, principals and errors of Kerberos, by what MIT's programs and library write."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hopsgpu.errors import ConfigError
from hopsgpu.storage.error_messages import explain
from hopsgpu.storage.hdfs import as_exception
from hopsgpu.storage.identity import ensure_credentials, hadoop_user, own_name
from hopsgpu.storage.kerberos import (
    KerberosTicket,
    check_ticket,
    default_realm,
    keytab_of,
    meaning,
    parse_tickets,
    user_of,
)
from tests.unit.backends.test_token_renewal import HDFS, ISSUED, blob, identifier, token_file

# As klist of MIT 1.20 lists them in the C locale.
TICKETS = """KerberosTicket cache: FILE:/tmp/krb5cc_1000
Default principal: alice@HOPSGPU.TEST

Valid starting     Expires            Service principal
11/26/26 12:47:19  11/26/26 22:47:19  krbtgt/HOPSGPU.TEST@HOPSGPU.TEST
\trenew until 12/03/26 12:47:19
11/26/26 12:47:20  11/27/26 22:47:19  krbtgt/OTHER.TEST@HOPSGPU.TEST
11/26/26 12:47:21  11/26/26 22:47:19  HTTP/localhost@HOPSGPU.TEST
\trenew until 12/03/26 12:47:19
"""


def at(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


def test_the_ticket_that_gets_the_others_is_read() -> None:
    assert parse_tickets(TICKETS) == KerberosTicket(
        "alice@HOPSGPU.TEST", at("2026-11-26 22:47:19"), at("2026-12-03 12:47:19")
    )
    once = TICKETS.replace("\trenew until 12/03/26 12:47:19\n", "")
    assert parse_tickets(once) == KerberosTicket("alice@HOPSGPU.TEST", at("2026-11-26 22:47:19"))
    assert parse_tickets(TICKETS.partition("Valid")[0]) is None
    assert parse_tickets("") is None


@pytest.fixture
def klist(tmp_path: Path) -> dict[str, str]:
    """An environment whose klist lists TICKETS."""
    program = tmp_path / "klist"
    program.write_text(f"#!/bin/sh\ncat <<'EOF'\n{TICKETS}EOF\n")
    program.chmod(0o755)
    krb5 = tmp_path / "krb5.conf"
    krb5.write_text("[libdefaults]\n  default_realm = HOPSGPU.TEST\n")
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KRB5_CONFIG": str(krb5)}


@pytest.mark.parametrize(
    ("now", "seconds", "words"),
    [
        ("2026-11-26 22:00:00", None, None),
        ("2026-11-26 22:00:00", 600.0, None),
        # The ticket lasts if it is renewed; after its renewal time it ends.
        ("2026-11-26 22:40:00", 600.0, None),
        ("2026-11-26 22:40:00", 1e6, "22:47:19, .* 1000000 s.*kinit"),
        ("2026-11-26 22:47:19", None, "22:47:19.* kinit"),
        ("2026-12-04 00:00:00", None, "22:47:19.* kinit"),
    ],
)
def test_ticket_must_last(
    klist: dict[str, str], now: str, seconds: float | None, words: str | None
) -> None:
    if words is None:
        ticket = check_ticket(klist, seconds, lambda: at(now))
        assert ticket is not None and ticket.principal == "alice@HOPSGPU.TEST"
        return
    with pytest.raises(ConfigError, match=words):
        check_ticket(klist, seconds, lambda: at(now))


def test_ticket_is_unknown_without_klist(tmp_path: Path) -> None:
    assert check_ticket({"PATH": str(tmp_path)}) is None


def test_credentials_are_checked_only_with_kerberos(tmp_path: Path) -> None:
    none = {"PATH": str(tmp_path)}
    (tmp_path / "klist").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "klist").chmod(0o755)
    ensure_credentials({}.get, {}.get, dict(none))
    kerberos = {"hadoop.security.authentication": "Kerberos"}
    with pytest.raises(ConfigError, match="run kinit"):
        ensure_credentials(kerberos.get, {}.get, dict(none))
    # In a container, YARN's tokens suffice.
    in_yarn = {**none, "HADOOP_TOKEN_FILE_LOCATION": "container_tokens"}
    ensure_credentials(kerberos.get, {}.get, in_yarn)


def test_proxy_user_needs_a_ticket_and_no_keytab() -> None:
    kerberos = {"hadoop.security.authentication": "kerberos"}
    proxied = {"HADOOP_PROXY_USER": "alice", "HADOOP_USER_NAME": "bob"}
    for hadoop in ({}, kerberos):
        assert hadoop_user(hadoop.get, proxied) == "alice"
    keytab = {"spark.kerberos.principal": "gateway", "spark.kerberos.keytab": __file__}
    with pytest.raises(ConfigError, match="HADOOP_PROXY_USER=alice"):
        ensure_credentials(kerberos.get, keytab.get, proxied)
    assert proxied.keys() == {"HADOOP_PROXY_USER", "HADOOP_USER_NAME"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark.kerberos.keytab": __file__}, "spark.kerberos.principal"),
        ({"spark.kerberos.principal": "a"}, "spark.kerberos.keytab"),
        ({"spark.kerberos.principal": "a", "spark.kerberos.keytab": "/no"}, "/no"),
    ],
)
def test_keytabs_that_cannot_be_used(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        keytab_of(settings.get)


def test_klist_of_another_kerberos_does_not_prove_a_missing_ticket(
    klist: dict[str, str], tmp_path: Path
) -> None:
    # Heimdal has a klist of this form.
    (tmp_path / "klist").write_text("#!/bin/sh\necho 'Principal: alice@HOPSGPU.TEST'\n")
    assert check_ticket(klist) is None
    (tmp_path / "klist").write_text("#!/bin/sh\necho 'klist: Bad format in cache' >&2; exit 1\n")
    with pytest.raises(ConfigError, match="^Bad format in cache$"):
        check_ticket(klist)


KINIT = """#!/bin/sh
# As kinit -k -t KEYTAB -c CACHE PRINCIPAL
echo "$7" >> "$0.asked"
echo ticket > "${5#FILE:}"
"""


def test_keytab_signs_in_once_for_each_principal(klist: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "klist"
    program.write_text(program.read_text().replace("/26 22:47", "/66 22:47"))
    kinit = tmp_path / "kinit"
    kinit.write_text(KINIT.replace("$7", "$6"))
    kinit.chmod(0o755)
    (tmp_path / "keytab").touch()
    environ = {**klist, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    before = dict(environ)
    kerberos = {"hadoop.security.authentication": "kerberos"}.get

    def settings(principal: str) -> dict[str, str]:
        keytab = f"local:{tmp_path}/keytab"
        return {"spark.kerberos.principal": principal, "spark.kerberos.keytab": keytab}

    caches = []
    for principal in ("alice", "alice", "bob"):
        ensure_credentials(kerberos, settings(principal).get, environ)
        caches.append(environ["KRB5CCNAME"])
        assert environ["KRB5_CLIENT_KTNAME"] == f"FILE:{tmp_path}/keytab"
    assert (tmp_path / "kinit.asked").read_text().split() == ["alice", "bob"]
    assert caches[0] == caches[1] != caches[2]
    assert len(list((tmp_path / "cache/hopsgpu/tickets").iterdir())) == 2
    # A session without a keytab uses the default ticket again.
    ensure_credentials(kerberos, {}.get, environ)
    assert environ == before


def test_hadoop_user_in_a_container(klist: dict[str, str], tmp_path: Path) -> None:
    kerberos = {"hadoop.security.authentication": "kerberos"}.get
    in_yarn = {**klist, "HADOOP_TOKEN_FILE_LOCATION": str(tmp_path / "tokens")}
    assert hadoop_user(kerberos, in_yarn) == own_name()
    owned = identifier(ISSUED, ISSUED + 1).replace(blob(b"alice"), blob(b"alice@HOPSGPU.TEST"))
    (tmp_path / "tokens").write_bytes(token_file({b"n": (owned, HDFS, b"10.0.0.1:8020")}, {}))
    assert hadoop_user(kerberos, in_yarn) == "alice"
    rules = {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.auth_to_local": "RULE:[1:$1]s/^/lake_/",
    }
    assert hadoop_user(rules.get, in_yarn) == "lake_alice"


def test_hadoop_user_outside_containers(klist: dict[str, str], tmp_path: Path) -> None:
    simple = {**klist, "HADOOP_USER_NAME": "mallory"}
    assert hadoop_user({}.get, simple) == "mallory"
    assert hadoop_user({}.get, klist) == own_name()
    program = tmp_path / "klist"
    program.write_text(program.read_text().replace("/26 22:47", "/66 22:47"))
    kerberos = {"hadoop.security.authentication": "kerberos"}
    assert hadoop_user(kerberos.get, simple) == "alice"
    rule = {**kerberos, "hadoop.security.auth_to_local": "RULE:[1:$1]s/^/lake_/"}
    assert hadoop_user(rule.get, simple) == "lake_alice"
    program.write_text(program.read_text().replace("/66 22:47", "/25 22:47"))
    with pytest.raises(ConfigError, match="alice@HOPSGPU.TEST expired"):
        hadoop_user(kerberos.get, simple)


ETL = "etl/node1.lake@LAKE.EXAMPLE"
RULES = (
    "RULE:[2:$1@$0](etl@LAKE\\.EXAMPLE)s/@.*// RULE:[1:$1](.*-adm)s/-adm$// "
    "RULE:[1:$1@$0](.*@AD\\.EXAMPLE)s/(.*)@.*/ad_$1//L DEFAULT"
)


@pytest.mark.parametrize(
    ("principal", "rules", "user"),
    [
        ("alice@LAKE.EXAMPLE", None, "alice"),
        ("alice", None, "alice"),
        (ETL, None, "etl"),
        (ETL, RULES, "etl"),
        ("bob-adm@LAKE.EXAMPLE", RULES, "bob"),
        ("Carol@AD.EXAMPLE", RULES, "ad_carol"),
        ("dave@LAKE.EXAMPLE", RULES.replace(" ", "\n    "), "dave"),
        ("dave@LAKE.EXAMPLE", "RULE:[1:$1@$0](.*@AD)s/@.*//DEFAULT", "dave"),
        ("dave@AD", "RULE:[1:$1@$0](.*@AD)s/@.*//DEFAULT", "dave"),
        ("d x@AD", "RULE:[1:$1@$0](d x@AD)s/ x@.*//\nDEFAULT", "d"),
        ("a-b-c@LAKE.EXAMPLE", "RULE:[1:$1]s/-/_/g", "a_b_c"),
        ("a-b-c@LAKE.EXAMPLE", "RULE:[1:$1]s/-/_/", "a_b-c"),
    ],
)
def test_user_of_a_principal_by_rules(principal: str, rules: str | None, user: str) -> None:
    assert user_of(principal, rules, "LAKE.EXAMPLE") == user


def test_principal_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="auth_to_local .* x@AD"):
        user_of("x@AD.EXAMPLE", None, "LAKE.EXAMPLE")
    with pytest.raises(ConfigError, match="'RULE:1'"):
        user_of("x@AD.EXAMPLE", "RULE:1", "LAKE.EXAMPLE")


def test_the_default_realm(klist: dict[str, str], tmp_path: Path) -> None:
    assert default_realm(klist) == "HOPSGPU.TEST"
    assert default_realm({"KRB5_CONFIG": f"{tmp_path}/gone:{klist['KRB5_CONFIG']}"}) is not None
    assert default_realm({"KRB5_CONFIG": f"{tmp_path}/gone"}) is None


# As clients wrote them on a real realm.
NO_TICKET = (
    'GssMajorCodes { raw: "0x00070000", calling_error: "none", routine_error: "GSS_S_NO_CRED",'
    ' supplementary_info: "0x0000" }, 2529639053, "No credentials were supplied, or the credentials'
    " were unavailable or inaccessible: No Kerberos credentials available (default cache:"
    " FILE:/tmp/none)"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NO_TICKET, "run kinit"),
        (
            "Major (720896): The referenced credential has expired, Minor (100001): Success",
            "expired: run kinit",
        ),
        (
            "kinit: Cannot contact any KDC for realm 'HOPSGPU.TEST' while getting initial"
            " credentials",
            "no KDC answers (Cannot contact",
        ),
        ("kinit: Clock skew too great while getting initial credentials", "synchronise it"),
        (
            "kinit: Keytab contains no suitable keys for bob@HOPSGPU.TEST while getting initial"
            " credentials",
            "the principal (Keytab contains",
        ),
        (
            "kinit: Password incorrect while getting initial credentials",
            "principal's (Password incorrect)",
        ),
        (
            "Major (851968): Unspecified GSS failure., Minor (2529638919): Server"
            " HTTP/node9@HOPSGPU.TEST not found in Kerberos database",
            "address (Server HTTP/node9@HOPSGPU.TEST",
        ),
        ("Keytab contains no suitable keys for bob", "(Keytab contains no suitable keys for bob)"),
        ("Permission denied: user=bob, access=WRITE", None),
        ("Connection refused", None),
    ],
)
def test_errors_of_kerberos_say_what_to_do(text: str, words: str | None) -> None:
    told = meaning(text)
    assert (told is None) if words is None else (told is not None and words in told), told


def test_the_lake_advises_kinit_and_not_to_ask_the_owner(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    meaning = explain(as_exception(NO_TICKET))
    assert meaning.kind == "permission" and not meaning.is_retryable
    assert "run kinit" in str(meaning) and "owner" not in str(meaning)
    no_kdc = explain(as_exception("Cannot contact any KDC for realm 'HOPSGPU.TEST'"))
    assert no_kdc.kind == "unreachable" and no_kdc.is_retryable
    # A path with such words is no error of Kerberos.
    absent = 'RPCError("java.io.FileNotFoundException", "File does not exist: /ticket expired-1")'
    assert explain(as_exception(absent)).kind == "absent"
    # In a container it is a token that is missing.
    monkeypatch.setenv("HADOOP_TOKEN_FILE_LOCATION", str(tmp_path / "tokens"))
    told = str(explain(as_exception(NO_TICKET)))
    assert "delegation token" in told and "no HDFS" in told
    assert "spark.kerberos.access.hadoopFileSystems" in told
