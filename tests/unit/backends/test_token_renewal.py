"""HDFS tokens on their way from the driver to the ranks' file."""

from __future__ import annotations

import hashlib
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from py4j.protocol import Py4JNetworkError

from hopsgpu.agent.rank_environment import rank_environment
from hopsgpu.backends.gang_allocation import GangAllocation
from hopsgpu.backends.spark import token_renewal as tokens_module
from hopsgpu.backends.spark.token_renewal import (
    POLL_SECONDS,
    TokenSender,
    expiry_warnings,
    read_tokens,
)
from hopsgpu.control.channel import Message
from hopsgpu.core.gang import GangExecutor
from hopsgpu.storage.hadoop_tokens import (
    OWN_FILE,
    TOKEN_FILE_VARIABLE,
    _Tokens,
    hdfs_services,
    keep_tokens,
    lifetime,
    merge_tokens,
    name_tokens,
)

HDFS = b"HDFS_DELEGATION_TOKEN"


def jvm_with(tokens: bytes, pause: float | None = None, *, is_kerberized: bool = True) -> Any:
    """A stand-in for `Jvm`; `planned` collects its calls of `plan_new_tokens`."""
    planned: list[None] = []
    return SimpleNamespace(
        is_kerberized=lambda: is_kerberized,
        hdfs_tokens=lambda: tokens,
        seconds_to_new_tokens=lambda: pause,
        plan_new_tokens=lambda: planned.append(None),
        planned=planned,
    )


def vint(number: int) -> bytes:
    """Up to 127 by itself, else a byte that tells how many follow."""
    return bytes([number]) if number < 128 else struct.pack("!bH", -114, number)


def blob(part: bytes) -> bytes:
    return vint(len(part)) + part


def token_file(tokens: dict[bytes, tuple[bytes, ...]], keys: dict[bytes, bytes]) -> bytes:
    """As Hadoop's Credentials writes it; a token is its identifier, kind and service."""
    content = b"HDTS\0" + vint(len(tokens))
    for alias, (identifier, kind, service) in tokens.items():
        content += b"".join(map(blob, (alias, identifier, b"password", kind, service)))
    content += vint(len(keys))
    return content + b"".join(blob(alias) + blob(key) for alias, key in keys.items())


OLD = token_file({b"n1:8020": (b"old" * 100, HDFS, b"n1:8020")}, {})
NEW = token_file({b"n1:8020": (b"new" * 100, HDFS, b"n1:8020")}, {})


@dataclass
class Server:
    """The part of the control channel that tokens go by."""

    certificate: bytes | None
    sent: list[tuple[int, str, bytes, str]] = field(default_factory=list)

    def send(self, key: int, kind: str, payload: bytes, *, run_id: str) -> bool:
        self.sent.append((key, kind, payload, run_id))
        return True


@dataclass
class Gang:
    server: Server
    read_tokens: Callable[[], bytes]
    containers: tuple[GangExecutor, ...] = (
        GangExecutor(3, "c3", "node1", "10.0.0.1", ()),
        GangExecutor(5, "c5", "node2", "10.0.0.2", ()),
    )


class Driver:
    """A `TokenSender` with a clock and with tokens that a test sets.

    Attributes:
        keeping: the agents that keep what they are sent, and say so.
    """

    def __init__(self, certificate: bytes | None = b"der", **environment: str) -> None:
        self.now, self.reads = 1000.0, 0
        self.tokens: bytes | Exception = OLD
        self.server = Server(certificate)
        self.warnings: list[str] = []
        self.keeping = {3, 5}
        gang = cast(GangAllocation, Gang(self.server, self._read))
        self._handover = TokenSender(gang, "run-1", self._warn, lambda: self.now, environment)

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def _read(self) -> bytes:
        self.reads += 1
        if isinstance(self.tokens, Exception):
            raise self.tokens
        return self.tokens

    def poll(self, after: float = 0.0) -> list[tuple[int, str, bytes, str]]:
        """What is sent at a look some seconds after the one before."""
        self.now += after
        self.server.sent.clear()
        self._handover.poll()
        for key, _, payload, _ in self.server.sent:
            if key in self.keeping:
                self.kept(key, payload)
        return list(self.server.sent)

    def kept(self, key: int, tokens: bytes) -> None:
        """An agent says that it keeps these."""
        digest = hashlib.sha256(tokens).hexdigest()
        self._handover.record_kept(key, Message("kept-tokens", {"digest": digest}))


def test_all_agents_are_handed_the_tokens_at_the_start() -> None:
    driver = Driver()
    assert driver.poll() == [(3, "tokens", OLD, "run-1"), (5, "tokens", OLD, "run-1")]
    assert driver.warnings == []


def test_only_tokens_that_have_changed_are_handed_again() -> None:
    driver = Driver()
    driver.poll()
    driver.tokens = NEW
    assert driver.poll(POLL_SECONDS - 1) == [] and driver.reads == 1
    assert [payload for _, _, payload, _ in driver.poll(1)] == [NEW, NEW]
    assert driver.poll(POLL_SECONDS) == [] and driver.reads == 3


def test_an_agent_that_does_not_keep_them_is_handed_them_again() -> None:
    driver = Driver()
    driver.keeping = {3}
    assert [key for key, *_ in driver.poll()] == [3, 5]
    assert [key for key, *_ in driver.poll(POLL_SECONDS)] == [5]
    driver.tokens = NEW
    assert [key for key, *_ in driver.poll(POLL_SECONDS)] == [3, 5]
    # A late word of the ones before.
    driver.kept(5, OLD)
    assert driver.poll(POLL_SECONDS) == [(5, "tokens", NEW, "run-1")]
    driver.kept(5, NEW)
    assert driver.poll(POLL_SECONDS) == []


def test_a_driver_that_could_not_keep_them_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(OLD)

    def refuse(*arguments: object) -> None:
        raise OSError("No space left on device")

    driver = Driver(HADOOP_TOKEN_FILE_LOCATION=str(file))
    driver.tokens = NEW
    with monkeypatch.context() as full:
        full.setattr(tokens_module, "keep_tokens", refuse)
        assert len(driver.poll()) == 2
    assert len(driver.warnings) == 1 and file.read_bytes() == OLD
    assert driver.poll(POLL_SECONDS) == []
    assert file.read_bytes() == NEW


def test_a_driver_in_a_container_keeps_them_too(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(OLD)
    # Its own file needs no way through the network.
    driver = Driver(certificate=None, HADOOP_TOKEN_FILE_LOCATION=str(tmp_path / "tokens"))
    driver.tokens = NEW
    driver.poll()
    assert (tmp_path / "tokens").read_bytes() == NEW
    driver.tokens = b"other"
    driver.poll(POLL_SECONDS)
    assert any("could not be stored in the driver's container" in each for each in driver.warnings)


def test_nothing_is_handed_where_there_is_none() -> None:
    driver = Driver(certificate=None)
    driver.tokens = b""
    assert driver.poll() == [] and driver.warnings == []


def test_tokens_do_not_go_in_the_clear() -> None:
    driver = Driver(certificate=None)
    assert driver.poll() == []
    driver.tokens = NEW
    assert driver.poll(POLL_SECONDS) == [] and driver.warnings == []


def vlong(number: int) -> bytes:
    """As WritableUtils writes a time."""
    size = (number.bit_length() + 7) // 8
    return struct.pack("b", -112 - size) + number.to_bytes(size)


def identifier(issued: float, ends: float) -> bytes:
    """As a NameNode writes a delegation token's."""
    names = blob(b"alice") + blob(b"rm") + blob(b"")
    return b"\0" + names + vlong(int(issued * 1000)) + vlong(int(ends * 1000)) + b"\x05\x02"


DAY = 86_400.0
ISSUED = 1_795_000_000.0
DATED = token_file(
    {
        b"a": (identifier(ISSUED, ISSUED + 7 * DAY), HDFS, b"10.0.0.1:8020"),
        b"b": (identifier(ISSUED - 5, ISSUED + 6 * DAY), HDFS, b"10.0.0.2:8020"),
        b"kms": (b"in another form", b"kms-dt", b"n1:9600"),
    },
    {},
)


def test_the_life_of_tokens_is_in_their_identifiers() -> None:
    life = lifetime(DATED)
    assert life is not None
    assert (life.issued, life.ends) == (ISSUED - 5, ISSUED + 6 * DAY)
    assert lifetime(token_file({}, {})) is None and lifetime(b"HDTS\x01") is None
    assert lifetime(OLD) is None  # not an identifier


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "only with a keytab"),
        ({"spark.network.crypto.enabled": "true"}, "only with a keytab"),
        ({"spark.kerberos.keytab": __file__}, "spark.network.crypto.enabled=true encrypts"),
        ({"spark.kerberos.keytab": __file__, "spark.network.crypto.enabled": "true"}, None),
        (
            {
                "spark.kerberos.renewal.credentials": "ccache",
                "spark.network.crypto.enabled": "true",
            },
            None,
        ),
    ],
)
def test_the_date_at_which_ranks_lose_hdfs_is_told_before(
    settings: dict[str, str], words: str | None
) -> None:
    if "spark.kerberos.keytab" in settings:
        settings["spark.kerberos.principal"] = "alice@LAKE.EXAMPLE"
    warnings = expiry_warnings(jvm_with(DATED), settings.get)
    if words is None:
        assert warnings == ()
        return
    (warning,) = warnings
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(ISSUED + 6 * DAY - 60))
    assert f"loses HDFS at {end}" in warning and words in warning


def test_tokens_of_a_short_life_are_looked_for_more_often() -> None:
    driver = Driver()
    short = {b"n": (identifier(ISSUED, ISSUED + 300), HDFS, b"10.0.0.1:8020")}
    driver.tokens = token_file(short, {})
    driver.poll()
    driver.poll(9.9)
    assert driver.reads == 1
    driver.poll(0.1)
    assert driver.reads == 2


IPS = {"nn1.lake": {"10.0.0.1"}, "nn2": {"10.0.0.9"}, "lake": {"10.0.0.1", "10.0.0.2"}}


def named(content: bytes) -> dict[bytes, bytes]:
    """Service → identifier of a file's HDFS tokens, as hdfs-native finds them."""
    return {token[4]: token[1] for token in _Tokens.parse(content).tokens.values()}


def test_a_token_for_an_address_serves_the_names_of_its_name_node(tmp_path: Path) -> None:
    file = tmp_path / "container_tokens"
    file.write_bytes(DATED)
    variables = {TOKEN_FILE_VARIABLE: str(file)}
    asked: list[str] = []

    def resolve(host: str) -> set[str]:
        asked.append(host)
        return IPS.get(host, set())

    addresses = ["nn1.lake:8020", "nn1.lake:9000", "nn2:8020", "lake", "gone", "10.0.0.1:8020", ""]
    name_tokens(addresses, variables, resolve)
    before = named(DATED)
    held = named(file.read_bytes())
    assert held.keys() - before.keys() == {b"nn1.lake:8020", b"lake:8020"}
    assert held[b"nn1.lake:8020"] == before[b"10.0.0.1:8020"]
    assert hdfs_services(variables) == sorted(
        ["10.0.0.1:8020", "10.0.0.2:8020", "lake:8020", "nn1.lake:8020"]
    )
    # A second time nothing of these is looked up or written.
    asked.clear()
    modified = file.stat().st_mtime_ns
    name_tokens(["nn1.lake:8020", "lake"], variables, resolve)
    assert (asked, file.stat().st_mtime_ns) == ([], modified)
    # The copies are those of the tokens that replace the present ones.
    fresh = {b"a": (identifier(ISSUED + 9, ISSUED + 99), HDFS, b"10.0.0.1:8020")}
    keep_tokens(token_file(fresh, {}), variables, tmp_path / "hopsgpu")
    renewed = named(file.read_bytes())
    assert renewed[b"nn1.lake:8020"] == renewed[b"10.0.0.1:8020"] == fresh[b"a"][0]
    assert renewed.keys() == held.keys()


@pytest.mark.parametrize("content", [None, b"", b"HDTS\x01", token_file({}, {}), OLD])
def test_without_tokens_for_addresses_nothing_is_looked_up(
    content: bytes | None, tmp_path: Path
) -> None:
    variables = {TOKEN_FILE_VARIABLE: str(tmp_path / "tokens")}
    if content is not None:
        (tmp_path / "tokens").write_bytes(content)
    name_tokens(["nn1.lake:8020"], variables, lambda host: pytest.fail(host))
    assert (tmp_path / "tokens").exists() == (content is not None)


def test_a_jvm_that_does_not_answer_is_a_warning_and_asked_again() -> None:
    driver = Driver()
    driver.tokens = Py4JNetworkError("gone")
    assert driver.poll() == [] and driver.poll(POLL_SECONDS) == []
    assert len(driver.warnings) == 1 and "gone" in driver.warnings[0]
    driver.tokens = NEW
    assert len(driver.poll(POLL_SECONDS)) == 2


@pytest.mark.parametrize(("kerberized", "expected"), [(True, NEW), (False, b"")])
def test_tokens_are_read_on_clusters_with_kerberos_only(kerberized: bool, expected: bytes) -> None:
    assert read_tokens(jvm_with(NEW, is_kerberized=kerberized)) == expected


@pytest.mark.parametrize(
    ("pause", "planned"), [(None, 0), (-1.0, 0), (200.0, 0), (400.0, 1), (1e16, 1)]
)
def test_spark_is_asked_for_tokens_that_it_would_get_too_late(
    pause: float | None, planned: int
) -> None:
    now = round(time.time())
    short = {b"n": (identifier(now - 10, now + 300), HDFS, b"10.0.0.1:8020")}
    jvm = jvm_with(token_file(short, {}), pause)
    assert read_tokens(jvm) == token_file(short, {})
    assert len(jvm.planned) == planned


def test_fresh_tokens_take_the_place_of_those_of_the_same_service() -> None:
    kms = (b"k", b"kms-dt", b"n1:9600")
    before = token_file(
        {
            b"other alias": (b"old", HDFS, b"ha-hdfs:lake"),
            b"second": (b"stays", HDFS, b"n2:8020"),
            b"kms": kms,
        },
        {b"secret": b"key"},
    )
    fresh = token_file({b"alias": (b"x" * 300, HDFS, b"ha-hdfs:lake")}, {})
    assert merge_tokens(before, fresh) == token_file(
        {
            b"second": (b"stays", HDFS, b"n2:8020"),
            b"kms": kms,
            b"alias": (b"x" * 300, HDFS, b"ha-hdfs:lake"),
        },
        {b"secret": b"key"},
    )


@pytest.mark.parametrize("before", [b"", b"HDTS\x01protobuf", OLD[:-40], b"HDTS\0"])
def test_what_was_before_and_cannot_be_read_is_left_out(before: bytes) -> None:
    assert merge_tokens(before, NEW) == NEW


@pytest.mark.parametrize("fresh", [b"", b"HDTS\x01protobuf", NEW[:-40], b"HDTS\0\x80"])
def test_fresh_tokens_in_another_format_are_refused(fresh: bytes, tmp_path: Path) -> None:
    given = tmp_path / "container_tokens"
    given.write_bytes(OLD)
    with pytest.raises(ValueError, match="Hadoop tokens"):
        keep_tokens(fresh, {TOKEN_FILE_VARIABLE: str(given)}, tmp_path / "hopsgpu")
    assert given.read_bytes() == OLD


def test_the_containers_own_file_is_replaced_whole(tmp_path: Path) -> None:
    given = tmp_path / "container_tokens"
    given.write_bytes(OLD)
    given.chmod(0o640)
    variables = {TOKEN_FILE_VARIABLE: str(given)}
    with given.open("rb") as reader:
        keep_tokens(NEW, variables, tmp_path / "hopsgpu")
        # Who has it open reads on in the old one.
        assert reader.read() == OLD
    assert given.read_bytes() == NEW
    assert stat.S_IMODE(given.stat().st_mode) == 0o600
    assert variables == {TOKEN_FILE_VARIABLE: str(given)}
    assert list(tmp_path.iterdir()) == [given]


@pytest.mark.parametrize("given", [None, "absent/container_tokens"])
def test_a_file_of_our_own_serves_where_the_containers_cannot(
    given: str | None, tmp_path: Path
) -> None:
    variables: dict[str, str] = (
        {} if given is None else {TOKEN_FILE_VARIABLE: str(tmp_path / given)}
    )
    own = tmp_path / "hopsgpu"
    keep_tokens(OLD, variables, own)
    first = dict(variables)
    keep_tokens(NEW, variables, own)
    assert variables == first == {TOKEN_FILE_VARIABLE: str(own / OWN_FILE)}
    assert (own / OWN_FILE).read_bytes() == NEW
    assert stat.S_IMODE((own / OWN_FILE).stat().st_mode) == 0o600
    assert rank_environment(variables, {}, [])[TOKEN_FILE_VARIABLE] == str(own / OWN_FILE)


def test_no_draft_is_left_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / OWN_FILE).mkdir()
    variables: dict[str, str] = {}
    with pytest.raises(IsADirectoryError):
        keep_tokens(NEW, variables, tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / OWN_FILE] and variables == {}
