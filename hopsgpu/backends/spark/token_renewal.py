"""The submitter's HDFS tokens, sent to a gang's agents whenever the driver has new ones.

YARN puts delegation tokens into a file of each container and never updates it; they expire (after 7
days by default). Spark gets new ones if it has a keytab or
`spark.kerberos.renewal.credentials=ccache`, but keeps them in the memory of its JVMs. This module
sends them from the driver's JVM to the agents, which write them to that file
(`hopsgpu.storage.hadoop_tokens`). It also writes the driver's own file if the driver runs in a
container, because the driver writes models and records with the same client.
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

# Spark gets new tokens at three quarters of their renewal interval, 24 hours by default, of a life
# of 7 days. Of shorter lives it is looked more often.
LOOK_SECONDS = 600.0
_LOOKS_IN_A_LIFE = 30
_CLIENT_STOPS_BEFORE = 60.0


def read_tokens(jvm: Jvm) -> bytes:
    """Return the submitter's HDFS tokens, as `Jvm.hdfs_tokens` does; b"" without Kerberos.

    If Spark would get new ones only when these have ended, it is made to get them now: where the
    NameNode was away when they were due, Spark 4.3 plans the next ones in 10^12 hours.
    """
    if not jvm.is_kerberized():
        return b""
    tokens = jvm.hdfs_tokens()
    if (life := lifetime(tokens)) is not None:
        try:
            _mend_plan(jvm, life)
        except (Py4JError, LookupError) as error:
            # A Spark that keeps its plan elsewhere: nothing is lost but the remedy.
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
    """Return until when ranks have HDFS, as a warning, if their tokens will not be replaced.

    Args:
        jvm: the application's.
        setting: returns a property of the application, or None.
    """
    life = lifetime(read_tokens(jvm))
    if life is None:
        return ()
    # hdfs-native uses no token in its last minute.
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(life.ends - _CLIENT_STOPS_BEFORE))
    loses = f"this run loses HDFS at {end}, when its delegation tokens end"
    renewed = setting("spark.kerberos.renewal.credentials") == "ccache"
    if not has_keytab(setting) and not renewed:
        return (
            f"{loses}: they can be replaced only with a keytab (spark.kerberos.keytab and"
            " spark.kerberos.principal)",
        )
    if not is_network_encrypted(setting):
        return (
            f"{loses}: new ones are not sent to the ranks, because they would be sent unencrypted;"
            " spark.network.crypto.enabled=true encrypts Spark's connections and hopsgpu's",
        )
    return ()


class TokenSender:
    """The handover of the submitter's new tokens to the agents of one attempt.

    An agent has the tokens once it confirms them; until then, every look sends them.

    Args:
        allocation: the gang.
        run_id: ID of the run.
        warn: called with each problem, for people.
        clock: returns the time in seconds.
        environment: environment of the driver.
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
        self._look_at: float | None = None
        self._kept_here = b""
        self._kept: dict[int, str] = {}

    def kept(self, key: int, message: Message) -> None:
        """Record which tokens an agent has confirmed."""
        self._kept[key] = message["digest"]

    def look(self) -> None:
        """Send the tokens to agents that do not have them; now and then, check for new ones.

        That is every ten minutes, and for tokens that live less than 5 hours 30 times in their
        life.
        """
        now = self._clock()
        if self._look_at is not None and now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            tokens = self._allocation.read_tokens()
        except Py4JError as error:
            self._warn(f"the submitter's HDFS tokens could not be read from Spark's JVM: {error}")
            return
        if tokens:
            if (life := lifetime(tokens)) is not None:
                pause = (life.ends - life.issued) / _LOOKS_IN_A_LIFE
                self._look_at = now + min(LOOK_SECONDS, pause)
            self._keep_here(tokens)
            self._hand(tokens)

    def _keep_here(self, tokens: bytes) -> None:
        if TOKEN_FILE_VARIABLE not in self._environment or tokens == self._kept_here:
            return
        try:
            keep_tokens(tokens, self._environment, Path("hopsgpu").absolute())
            self._kept_here = tokens
        except (OSError, ValueError) as error:
            self._warn(
                f"renewed HDFS tokens could not be stored in the driver's container: {error}"
            )

    def _hand(self, tokens: bytes) -> None:
        server = self._allocation.server
        if server.certificate is None:
            # The plan has warned of it, with the date.
            log.debug("%s: HDFS tokens are not sent unencrypted", self._run_id)
            return
        digest = hashlib.sha256(tokens).hexdigest()
        for container in self._allocation.containers:
            if self._kept.get(container.key) != digest:
                server.send(container.key, "tokens", tokens, run_id=self._run_id)
