"""Which of a container's tokens goes to which NameNode's web address, and that nobody reads it."""

from __future__ import annotations

import base64
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest

from hopsgpu.errors import StoreError
from hopsgpu.storage.hadoop_tokens import TOKEN_FILE_VARIABLE, name_services, token_owner, web_token
from hopsgpu.storage.lake import LakePath
from tests.unit.backends.test_token_renewal import HDFS, ISSUED, blob, identifier, token_file

ONE, TWO = identifier(ISSUED, ISSUED + 1), identifier(ISSUED, ISSUED + 2)
HA = {
    "dfs.nameservices": "lake",
    "dfs.namenode.rpc-address.lake.nn1": "nn1.lake:8020",
    "dfs.namenode.http-address.lake.nn2": "nn2.lake:9870",
    "dfs.namenode.http-address": "other:9870",
}


@pytest.fixture
def variables(tmp_path: Path) -> Mapping[str, str]:
    held = {
        b"a": (ONE, HDFS, b"10.0.0.1:8020"),
        b"b": (TWO, HDFS, b"ha-hdfs:lake"),
        b"c": (b"k", b"kms-dt", b"nn9:9600"),
    }
    (tmp_path / "tokens").write_bytes(token_file(held, {}))
    return {TOKEN_FILE_VARIABLE: str(tmp_path / "tokens")}


def test_hosts_of_name_services() -> None:
    assert name_services(HA) == {"lake": {"nn1.lake", "nn2.lake"}}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", ONE),
        ("named", ONE),
        ("nn2.lake", TWO),
        ("nn9", None),  # neither the only token nor that of another service goes to a stranger
        ("stranger", None),
    ],
)
def test_a_token_goes_to_its_own_name_node(
    variables: Mapping[str, str], host: str, expected: bytes | None
) -> None:
    resolve = {"named": {"10.0.0.1"}}.get
    found = web_token(variables, host, name_services(HA), lambda name: resolve(name, set()))
    if expected is None:
        assert found is None
        return
    assert found is not None
    content = base64.urlsafe_b64decode(found + "=" * (-len(found) % 4))
    assert content.startswith(blob(expected) + blob(b"password") + blob(HDFS))


def test_the_owner_of_the_tokens(variables: Mapping[str, str]) -> None:
    assert token_owner(variables) == "alice"
    assert token_owner({}) is None


def test_a_token_is_in_no_message_and_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "core-site.xml").write_text(
        "<configuration><property><name>hadoop.security.authentication</name>"
        "<value>kerberos</value></property></configuration>"
    )
    (tmp_path / "tokens").write_bytes(token_file({b"a": (ONE, HDFS, b"127.0.0.1:8020")}, {}))
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "tokens"))
    token = web_token({TOKEN_FILE_VARIABLE: str(tmp_path / "tokens")}, "127.0.0.1", {})
    assert token is not None
    # Nobody listens there.
    with pytest.raises(StoreError) as failed:
        LakePath("webhdfs://127.0.0.1:1/models", should_fail_fast=True).stat()
    told = "".join(traceback.format_exception(failed.value))
    assert "models" in told and token not in told
