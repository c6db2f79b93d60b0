"""A LocalQueue of Kueue, which admits gangs of the namespace: requests to the API server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from hopsgpu.cluster_managers.flavors import NO_FLAVORS, Flavors
from hopsgpu.cluster_managers.kubernetes.api_client import ApiClient, ApiError, Forbidden
from hopsgpu.cluster_managers.kubernetes.application_leases import LABEL
from hopsgpu.cluster_managers.kubernetes.kueue import (
    GROUP,
    QUEUE,
    Workload,
    choose_queue,
    deleted_workload,
    flavors_of,
    served_version,
    workload_of,
)
from hopsgpu.cluster_managers.kubernetes.pods import mapping_of, text_of
from hopsgpu.errors import ConfigError

log = logging.getLogger(__name__)

_FORBIDDEN, _NOT_FOUND = 403, 404
_DELETED = "DELETED"


class KueueQueue:
    """A client of the API server for the Workloads in one LocalQueue; threads may share it.

    Attributes:
        name: name of the LocalQueue.
        version: version of Kueue's API.
    """

    def __init__(self, client: ApiClient, version: str, name: str) -> None:
        self._client = client
        self.version = version
        self.name = name

    def create(self, body: Mapping[str, Any]) -> Workload:
        return workload_of(self._client.create(self._path, body))

    def read(self, workload: Workload) -> Workload:
        """Return the present state of a Workload, also of one that was deleted."""
        try:
            return workload_of(self._client.get(f"{self._path}/{workload.name}"))
        except ApiError as error:
            if error.status != _NOT_FOUND:
                raise
            return deleted_workload(workload.name, workload.application)

    def delete(self, workload: Workload) -> None:
        try:
            self._client.delete(f"{self._path}/{workload.name}")
        except ApiError as error:
            # Somebody else may have deleted it.
            if error.status != _NOT_FOUND:
                raise

    def workloads(self) -> Iterator[Workload]:
        """Yield the Workloads of hopsgpu's applications in all queues of the namespace."""
        yield from map(workload_of, self._client.items(self._path, labelSelector=LABEL))

    def watch(self, application_id: str, seconds: float) -> Iterator[Workload]:
        """Yield an application's Workloads as they are, and then as they change.

        Args:
            seconds: the time after which it ends.
        """
        selector = f"{LABEL}={application_id}"
        for change, answer in self._client.watch(self._path, seconds, labelSelector=selector):
            workload = workload_of(answer)
            if change == _DELETED:
                workload = deleted_workload(workload.name, workload.application)
            yield workload

    def flavors(self, names: Sequence[str]) -> Flavors:
        """Return the nodes of flavors; all nodes if the caller may not read flavors."""
        path = f"/apis/{GROUP}/{self.version}/resourceflavors"
        try:
            names = [quote(name, safe="") for name in names]
            return flavors_of([self._client.get(f"{path}/{name}") for name in names])
        except ApiError as error:
            if error.status not in (_FORBIDDEN, _NOT_FOUND):
                raise
            log.info("pods are created without the labels of Kueue's flavors: %s", error)
            return NO_FLAVORS

    @property
    def _path(self) -> str:
        namespace = quote(self._client.namespace)
        return f"/apis/{GROUP}/{self.version}/namespaces/{namespace}/workloads"


def find_kueue_version(client: ApiClient) -> str | None:
    """Return the version of Kueue's API that the API server offers; None without Kueue."""
    try:
        answer = client.get(f"/apis/{GROUP}")
    except ApiError as error:
        if error.status != _NOT_FOUND:
            raise
        return None
    version = served_version(answer)
    if version is None:
        log.warning("the API server has Kueue, but in no version that hopsgpu knows")
    return version


def find_queue(client: ApiClient, chosen: str) -> KueueQueue | None:
    """Return the LocalQueue of gangs in the namespace; None if gangs need none.

    Args:
        chosen: the LocalQueue that the user has named; "" for the only one.

    Raises:
        ConfigError: the chosen one does not exist, or there are several and none is chosen.
    """
    version = find_kueue_version(client)
    if version is None:
        if chosen:
            raise ConfigError(
                f"{QUEUE}={chosen!r}: this Kubernetes has no Kueue: remove the property, or have an"
                " administrator install Kueue"
            )
        return None
    namespace = client.namespace
    try:
        answers = list(
            client.items(f"/apis/{GROUP}/{version}/namespaces/{quote(namespace)}/localqueues")
        )
    except Forbidden as error:
        if error.status != _FORBIDDEN or chosen:
            raise
        log.info("gangs do not wait for Kueue, whose queues may not be listed: %s", error)
        return None
    except ApiError as error:
        if error.status != _NOT_FOUND:
            raise
        return None
    names = [text_of(mapping_of(answer, "metadata"), "name") for answer in answers]
    name = choose_queue(names, chosen, namespace)
    return None if name is None else KueueQueue(client, version, name)
