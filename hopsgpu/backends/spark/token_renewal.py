"""The submitter's HDFS tokens, sent to a gang's agents whenever the driver has new ones.

YARN puts delegation tokens into a file of each container and never updates this file. The tokens
expire, after 7 days by default. Spark gets new tokens if it has a keytab or
`spark.kerberos.renewal.credentials=ccache`, but keeps them in the memory of its JVMs. This module
sends them from the driver's JVM to the agents, which write them to the file
(`hopsgpu.storage.hadoop_tokens`). If the driver runs in a container, its file is written too,
because the driver writes models and records with the same client.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError

from hopsgpu.backends.spark.jvm import Jvm
from hopsgpu.control.channel import Message
from hopsgpu.control.tls import is_network_encrypted
from hopsgpu.storage.hadoop_tokens import TOKEN_FILE_VARIABLE, Lifetime, keep_tokens, lifetime
from hopsgpu.storage.kerberos import has_keytab

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from hopsgpu.backends.gang_allocation import GangAllocation

# Spark gets new tokens at three quarters of their renewal interval, which is 24 hours by default.
# Tokens with a short lifetime are polled more often.
POLL_SECONDS = 600.0
_POLLS_PER_LIFE = 30
_CLIENT_STOPS_BEFORE = 60.0


def read_tokens(jvm: Jvm) -> bytes:
    """Return the submitter's HDFS tokens, as `Jvm.hdfs_tokens` does; b"" without Kerberos.

    If Spark plans new tokens only after the end of these, make Spark get new tokens now: if the
    NameNode was down at the planned time, Spark 4.3 plans the next tokens in 10^12 hours.
    """
    if not jvm.is_kerberized():
        return b""
    tokens = jvm.hdfs_tokens()
    if (life := lifetime(tokens)) is not None:
        try:
            _mend_plan(jvm, life)
        except (Py4JError, LookupError) as error:
            # This Spark keeps its plan elsewhere, so the plan cannot be corrected.
            log.info("when Spark will get new HDFS tokens is not known: %r", error)
    return tokens


def _mend_plan(jvm: Jvm, life: Lifetime) -> None:
    pause = jvm.seconds_to_new_tokens()
    if pause is not None and time.time() + pause > life.ends:
        log.warning(
            "Spark would get new HDFS tokens in %.3g hours, after the end of these: a NameNode did"
            " not answer when they were due; asks Spark to get them now",
            pause / 3600,
        )
        jvm.plan_new_tokens()


def expiry_warnings(jvm: Jvm, setting: Callable[[str], str | None]) -> tuple[str, ...]:
    """Return a warning with the time at which ranks lose HDFS, if their tokens are not replaced."""
    life = lifetime(read_tokens(jvm))
    if life is None:
        return ()
    # hdfs-native does not use a token in its last minute.
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(life.ends - _CLIENT_STOPS_BEFORE))
    problem = f"this run loses HDFS at {end}, when its delegation tokens end"
    is_renewed = setting("spark.kerberos.renewal.credentials") == "ccache"
    if not has_keytab(setting) and not is_renewed:
        return (
            f"{problem}: they can be replaced only with a keytab (spark.kerberos.keytab and"
            " spark.kerberos.principal)",
        )
    if not is_network_encrypted(setting):
        return (
            f"{problem}: new ones are not sent to the ranks, because they would be sent"
            " unencrypted; spark.network.crypto.enabled=true encrypts Spark's connections and"
            " hopsgpu's",
        )
    return ()


class TokenSender:
    """Sends the submitter's new tokens to the agents of one attempt.

    Each poll sends the tokens again until the agent confirms them.

    Args:
        allocation: the gang.
        warn: called with each problem, for people.
    """

    def __init__(
        self,
        allocation: GangAllocation,
        run_id: str,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        environment: MutableMapping[str, str] = os.environ,
    ) -> None:
        self._allocation = allocation
        self._run_id = run_id
        self._warn = warn
        self._clock = clock
        self._environment = environment
        self._next_poll: float | None = None
        self._stored = b""
        self._kept: dict[int, str] = {}

    def record_kept(self, key: int, message: Message) -> None:
        self._kept[key] = message["digest"]

    def poll(self) -> None:
        """Read the tokens if that is due, and send them to agents that do not have them.

        The interval is ten minutes, or a 30th of a lifetime below 5 hours.
        """
        now = self._clock()
        if self._next_poll is not None and now < self._next_poll:
            return
        self._next_poll = now + POLL_SECONDS
        try:
            tokens = self._allocation.read_tokens()
        except Py4JError as error:
            self._warn(f"the submitter's HDFS tokens could not be read from Spark's JVM: {error}")
            return
        if tokens:
            if (life := lifetime(tokens)) is not None:
                pause = (life.ends - life.issued) / _POLLS_PER_LIFE
                self._next_poll = now + min(POLL_SECONDS, pause)
            self._store_at_driver(tokens)
            self._send(tokens)

    def _store_at_driver(self, tokens: bytes) -> None:
        if TOKEN_FILE_VARIABLE not in self._environment or tokens == self._stored:
            return
        try:
            keep_tokens(tokens, self._environment, Path("hopsgpu").absolute())
            self._stored = tokens
        except (OSError, ValueError) as error:
            self._warn(
                f"renewed HDFS tokens could not be stored in the driver's container: {error}"
            )

    def _send(self, tokens: bytes) -> None:
        server = self._allocation.server
        if server.certificate is None:
            # The plan has a warning with the date.
            log.debug("%s: HDFS tokens are not sent unencrypted", self._run_id)
            return
        digest = hashlib.sha256(tokens).hexdigest()
        for container in self._allocation.containers:
            if self._kept.get(container.key) != digest:
                server.send(container.key, "tokens", tokens, run_id=self._run_id)
