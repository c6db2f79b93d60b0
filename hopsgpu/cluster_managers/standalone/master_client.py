"""HTTP to the web interface of standalone masters, of which one is active."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from hopsgpu.cluster_managers.http_client import (
    HttpAnswer,
    NoAccess,
    NoAnswer,
    NotUnderstood,
    exchange,
)
from hopsgpu.cluster_managers.standalone.application_page import ApplicationPage, read_page
from hopsgpu.cluster_managers.standalone.master_answers import ALIVE, MasterState, read_master
from hopsgpu.cluster_managers.standalone.master_page import read_version
from hopsgpu.cluster_managers.standalone.token_file import (
    TOKEN_SETTING,
    TOKEN_VARIABLE,
    read_token,
)
from hopsgpu.errors import HopsGpuError

log = logging.getLogger(__name__)

# Timeouts of connection and answer.
SECONDS = (3.0, 10.0)
_APPLICATION = "/app/?appId="
_UNAUTHORIZED = (401, 403)


class MasterClient:
    """A client of the active one of several masters; threads may share it.

    Args:
        addresses: base URLs of the masters' web interfaces.
        gpu_resource: Spark's name of the resource that counts GPUs.
        token_file: file of a bearer token, which is read for each request; None for no token.
        seconds: limits to connect to an address, and to be answered.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        gpu_resource: str,
        token_file: Path | None = None,
        seconds: tuple[float, float] = SECONDS,
    ) -> None:
        self._addresses = addresses
        self._gpu_resource = gpu_resource
        self._token_file = token_file
        self._seconds = seconds
        # The active address is asked first, so that requests do not wait for a host that is down.
        self._active_address: str | None = None

    @property
    def address(self) -> str:
        """Return the address of the master that was active last; the first one before that."""
        return self._active_address or next(iter(self._addresses), "")

    def state(self) -> MasterState:
        """Return what the active master reports.

        Raises:
            NotUnderstood: a master answered in an unknown form.
            HopsGpuError: no master is active; the message has the status of each one.
        """
        statuses = []
        for address in sorted(self._addresses, key=lambda url: url != self._active_address):
            try:
                state = self._state_at(address)
            except NoAccess as error:
                raise HopsGpuError(str(error)) from error
            except NoAnswer as error:
                log.info("the Spark master at %s did not answer: %s", address, error)
                statuses.append(f"{address} does not answer ({error})")
                continue
            if state.status == ALIVE:
                if address != self._active_address:
                    log.info("the Spark master at %s is active", address)
                self._active_address = address
                return state
            statuses.append(f"{address} is {state.status}")
        raise HopsGpuError(
            f"no Spark master is {ALIVE}: {'; '.join(statuses) or 'no address is configured'}. Is a"
            " master up, and is this the port of its web interface (spark.hopsgpu.master.ui)? A new"
            " master recovers for spark.worker.timeout at most"
        )

    def standby_statuses(self) -> dict[str, str]:
        """Return the status of each master besides the active one, or its error, by address."""
        statuses = {}
        for address in self._addresses:
            if address == self._active_address:
                continue
            try:
                statuses[address] = self._state_at(address).status
            except HopsGpuError as error:
                statuses[address] = f"without an answer ({error})"
        return statuses

    def spark_version(self) -> str:
        """Return the version of the Spark of the master that was active last; "" if unknown.

        Raises:
            NoAnswer: the master does not answer.
        """
        return read_version(self._get(self.address, "/", "text/html").text)

    def page(self, application_id: str) -> ApplicationPage | None:
        """Return the page of an application; None if the active master does not know it.

        Raises:
            NotUnderstood: the master answered in an unknown form.
            HopsGpuError: no master is active.
        """
        if self._active_address is None:
            self.state()
        asked = self.address
        try:
            page = self._page_at(asked, application_id)
        except NoAnswer as error:
            log.info("the Spark master at %s did not answer: %s", asked, error)
            page = None
        if page is not None:
            return page
        # The master may have become a standby one, which knows no application.
        self.state()
        try:
            return self._page_at(self.address, application_id)
        except NoAnswer as error:
            raise HopsGpuError(
                f"the Spark master at {self.address} does not answer ({error})"
            ) from error

    def _state_at(self, address: str) -> MasterState:
        answer = self._get(address, "/json/", "application/json").parse_json()
        with _check_form(address, "/json/"):
            return read_master(answer, self._gpu_resource)

    def _page_at(self, address: str, application_id: str) -> ApplicationPage | None:
        path = _APPLICATION + quote(application_id, safe="")
        html = self._get(address, path, "text/html").text
        with _check_form(address, path):
            page = read_page(html, self._gpu_resource)
            if page is not None and page.id != application_id:
                raise ValueError("it shows another application")
        return page

    def _get(self, address: str, path: str, accept: str) -> HttpAnswer:
        token = None if self._token_file is None else read_token(self._token_file)
        try:
            return exchange("GET", address + path, self._seconds, accept=accept, token=token)
        except NoAnswer as error:
            if error.status not in _UNAUTHORIZED or isinstance(error, NoAccess):
                raise
            refused = (
                f"refused the token of {self._token_file}: has it expired, and does it have the"
                " key of the master's JWSFilter?"
                if token
                else f"needs credentials: a bearer token for JWSFilter in the file of"
                f" {TOKEN_SETTING} ({TOKEN_VARIABLE}), a user and password in ~/.netrc, or a"
                " Kerberos ticket (kinit)"
            )
            raise NoAccess(
                f"the Spark master at {address} {refused} ({error})", error.status
            ) from error


@contextlib.contextmanager
def _check_form(address: str, path: str) -> Iterator[None]:
    """Raise an error that names the master if its answer cannot be read."""
    try:
        yield
    except ValueError as error:
        raise NotUnderstood(
            f"the Spark master at {address} answered {path.partition('?')[0]} in an unknown form:"
            f" {error}. Is it the web interface of a standalone master? hopsgpu supports Spark 3.5"
            " to 4.3"
        ) from error
