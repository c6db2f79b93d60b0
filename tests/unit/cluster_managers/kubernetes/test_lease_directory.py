"""The queue of gangs in Leases, on an API server that keeps them as Kubernetes 1.34.4 does."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from hopsgpu.backends.gang_queue import GangQueueReader, QueueMember, StandingOffer, queued
from hopsgpu.cluster_managers.kubernetes import lease_directory
from hopsgpu.cluster_managers.kubernetes.lease_directory import (
    LeaseQueueDirectory,
    LeaseQueueRoot,
    file_status,
    lease_name,
)
from hopsgpu.core.queue_policy import (
    MAX_EXECUTORS,
    Bound,
    Offer,
    Ticket,
    asking_name,
    queue_tag,
    turn_name,
)
from hopsgpu.errors import StoreError
from tests.unit.cluster_managers.kubernetes.api_server import (
    LEASES,
    NAMESPACE,
    SELF,
    ApiServer,
    ReceivedRequest,
    Reply,
    api_server,
    list_of,
    manager_of,
    select,
)

NOW = 1_796_067_993.7
NAME = "ticket-001796067993000-0a1b2c3d-gang-2x1-e3b0c442-none-0-0-spark.1"
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def status(code: int, reason: str) -> Reply:
    return code, {"kind": "Status", "message": f"it is {reason}", "reason": reason}


class Leases:
    """The Leases of a namespace, as far as a queue needs them; a clock of its own.

    Attributes:
        now: seconds since the epoch, which tests set.
        failures: for the next requests, a status to answer with, and whether the request is done
            nevertheless; None for a request that is answered.
        forbidden: methods that the caller may not use.
    """

    def __init__(self) -> None:
        self.leases: dict[str, dict[str, Any]] = {}
        self.now = NOW
        self.failures: list[tuple[int, bool] | None] = []
        self.forbidden: set[str] = set()
        self._version = 1000

    @property
    def time(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def get(self, line: str, default: Reply) -> Any:
        method, _, path = line.partition(" ")
        if path == SELF:
            review = {"metadata": {"creationTimestamp": self.time}}
            return 201, {**review, "status": {"userInfo": {"username": "alice"}}}
        return self._answer if path.startswith(LEASES) else default

    def _answer(self, request: ReceivedRequest) -> Reply:
        if request.method in self.forbidden:
            return status(403, "Forbidden")
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not failure[1]:
            return status(failure[0], "Unavailable")
        reply: Reply = getattr(self, f"_{request.method.lower()}")(request)
        return reply if failure is None else status(failure[0], "Unavailable")

    def _get(self, request: ReceivedRequest) -> Reply:
        if request.path == LEASES:
            return select(list(self.leases.values()))(request)
        return self._existing(request, lambda name: self.leases[name])

    def _delete(self, request: ReceivedRequest) -> Reply:
        return self._existing(request, self.leases.pop)

    def _existing(self, request: ReceivedRequest, take: Callable[[str], Any]) -> Reply:
        name = request.path.rpartition("/")[2]
        return (200, take(name)) if name in self.leases else status(404, "NotFound")

    def _post(self, request: ReceivedRequest) -> Reply:
        name = request.body["metadata"]["name"]
        if name in self.leases:
            return status(409, "AlreadyExists")
        return 201, self._put_lease(name, request.body, self.time)

    def _put(self, request: ReceivedRequest) -> Reply:
        name = request.path.rpartition("/")[2]
        if name not in self.leases:  # a Lease may be created by an update
            return 201, self._put_lease(name, request.body, self.time)
        before = self.leases[name]
        if request.body["metadata"].get("resourceVersion") != _version(before):
            return status(409, "Conflict")
        return 200, self._put_lease(name, request.body, before["metadata"]["creationTimestamp"])

    def _put_lease(self, name: str, body: dict[str, Any], created: str) -> dict[str, Any]:
        self._version += 1
        lease = copy.deepcopy(body)
        entry = {"manager": "python-urllib3", "operation": "Update", "time": self.time}
        lease["metadata"] |= {
            "resourceVersion": str(self._version),
            "creationTimestamp": created,
            "managedFields": [entry],
        }
        self.leases[name] = lease
        return lease


def _version(lease: dict[str, Any]) -> str:
    version: str = lease["metadata"]["resourceVersion"]
    return version


@pytest.fixture
def leases() -> Leases:
    return Leases()


@pytest.fixture
def server(leases: Leases) -> Iterator[ApiServer]:
    with api_server() as serving:
        serving.answers = leases  # type: ignore[assignment]
        yield serving


@pytest.fixture
def root(server: ApiServer) -> LeaseQueueRoot:
    return manager_of(server).queue_root(("default",))


@pytest.fixture
def directory(root: LeaseQueueRoot) -> LeaseQueueDirectory:
    return root / "default"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_directory, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(lease_directory, "_MAX_PAUSE", 0.002)
    monkeypatch.setattr(lease_directory, "_RETRY_SECONDS", 0.2)


def of_another_user(server: ApiServer) -> LeaseQueueDirectory:
    client = manager_of(server)._client
    return LeaseQueueRoot(client, LEASES, ("default",), lambda: "bob") / "default"


def lease(file: str = NAME, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": lease_name("default", file),
            "annotations": {"hopsgpu/file": file, "hopsgpu/user": "alice"},
            "creationTimestamp": "2026-11-30T19:00:00Z",
            **metadata,
        }
    }


LONGEST = Ticket(
    filed=999_999_999_999_999,
    id="f" * 8,
    is_growth=True,
    executors=MAX_EXECUTORS,
    gpus=1000,
    queue="f" * 8,
    bound=Bound.CLUSTER,
    passed=3,
    application="spark-" + "f" * 90,
    turns=999_999,
)


@pytest.mark.parametrize(
    "name",
    [
        NAME,
        LONGEST.name,
        turn_name(999_999_999_999),
        asking_name(1, "spark-" + "A_." * 40),
        Offer("0" * 8, 100_000, 1000, 9, "f" * 8, "spark-1", "Größe_+=." * 9).name,
        Offer("0" * 8, 1, 1, 0, "f" * 8, "a" * 64, "学" * 30).name,
        "draft-0a1b2c3d",
        "学",
    ],
)
def test_names_of_leases_are_valid(name: str) -> None:
    assert len(name) <= lease_directory._MAX_FILE_NAME
    assert SUBDOMAIN.fullmatch(lease_name("default", name))
    assert len(lease_name("default", name)) <= 253
    assert lease_name("default", name) == lease_name("default", name)
    found = file_status(lease(name), "default")
    assert found is not None and found.name == name


def test_each_file_has_a_lease_of_its_own() -> None:
    names = [lease_name(p, n) for p in ("a", "b") for n in ("offer-X", "offer-x", "offer.x")]
    assert len({*names}) == 6 and names[0].startswith("hopsgpu-queue-offer-x-")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        lease(annotations={}),
        lease(annotations={"hopsgpu/file": turn_name(1)}),
        lease(annotations={"hopsgpu/file": 3}),
        lease("x" * 300),
        lease(name=lease_name("other", NAME)),
    ],
)
def test_other_leases_are_no_files(answer: dict[str, Any]) -> None:
    assert file_status(answer, "default") is None


def test_the_time_of_a_file_is_the_servers() -> None:
    def modified(**metadata: Any) -> int:
        found = file_status(lease(**metadata), "default")
        assert found is not None
        return found.modified % 3_600_000 // 1000

    assert modified() == modified(managedFields=[{"time": "no time"}, 3, {}]) == 0
    later = [{"time": "2026-11-30T19:00:09Z"}, {"time": "2026-11-30T19:00:05Z"}]
    assert modified(managedFields=later) == 9
    file = {"hopsgpu/file": NAME}
    for kept, seconds in (("19:00:04.000000Z", 4), ("23:00:00.000000Z", 9)):
        annotations = {**file, "hopsgpu/modified": f"2026-11-30T{kept}"}
        assert modified(managedFields=later, annotations=annotations) == seconds
    owner = file_status(lease(annotations={**file, "hopsgpu/user": "a\n" * 500}), "default")
    assert owner is not None and len(owner.owner) == 200 and "\n" not in owner.owner


def test_a_file_is_created_renewed_and_removed(
    directory: LeaseQueueDirectory, server: ApiServer, leases: Leases
) -> None:
    file = directory / NAME
    with pytest.raises(StoreError) as absent:
        file.stat()
    assert absent.value.kind == "absent"
    file.write(b"")
    (present,) = leases.leases.values()
    assert present["metadata"]["labels"] == {"hopsgpu/queue": "default"}
    before = file.stat()
    assert (before.modified, before.owner, before.name) == (int(NOW) * 1000, "alice", NAME)
    leases.now += 4.0
    file.write(b"")
    assert file.stat().modified == before.modified + 4000
    assert directory.entries() == (file.stat(),) and directory.names() == (NAME,)
    file.remove()
    file.remove()
    assert directory.names() == ()
    path = f"{LEASES}/{lease_name('default', NAME)}"
    methods = [line.partition(" ")[0] for line in server.lines if line.endswith(path)]
    # A renewal is one request.
    assert methods == ["GET", "GET", "PUT", "GET", "GET", "DELETE", "DELETE"]
    renewals = server.bodies("POST", LEASES) + server.bodies("PUT", path)
    assert len({body["spec"]["renewTime"] for body in renewals}) == 2


def test_each_renewal_changes_the_lease(directory: LeaseQueueDirectory, leases: Leases) -> None:
    """Otherwise the API server would not change the time."""
    identities = set()
    for _ in range(3):
        (directory / NAME).write(b"")
        (present,) = leases.leases.values()
        identities.add(present["spec"]["holderIdentity"])
    assert len(identities) == 3


def test_a_file_that_others_wrote_or_removed_is_renewed(
    directory: LeaseQueueDirectory, root: LeaseQueueRoot, leases: Leases
) -> None:
    file, again = directory / NAME, root / "default" / NAME
    file.write(b"")
    leases.now += 2
    again.write(b"")
    leases.now += 2
    file.write(b"")
    assert again.stat().modified == int(NOW + 4) * 1000
    again.remove()
    file.write(b"")
    assert again.stat().modified == int(NOW + 4) * 1000


def test_a_file_of_another_user_is_not_renewed(
    directory: LeaseQueueDirectory, server: ApiServer, leases: Leases
) -> None:
    (of_another_user(server) / NAME).write(b"")
    with pytest.raises(StoreError, match="it is of bob") as refusal:
        (directory / NAME).write(b"")
    assert refusal.value.kind == "permission"
    (present,) = leases.leases.values()
    present["metadata"]["annotations"] = {}
    with pytest.raises(StoreError, match="no file of the queue"):
        (directory / NAME).write(b"")


def test_leases_have_no_content(directory: LeaseQueueDirectory) -> None:
    with pytest.raises(StoreError, match="no content"):
        (directory / NAME).write(b"x")


def test_a_rename_is_strict_and_keeps_the_time(
    directory: LeaseQueueDirectory, root: LeaseQueueRoot, leases: Leases
) -> None:
    (directory / "draft-00000000").write(b"")
    leases.now += 3
    assert (directory / "draft-00000000").rename(directory / turn_name(1))
    (turn,) = directory.entries()
    assert (turn.name, turn.modified) == (turn_name(1), int(NOW) * 1000)
    # Another process, which has not written it.
    assert (root / "default" / turn_name(1)).rename(root / "default" / turn_name(2))
    assert (directory / turn_name(2)).stat().modified == int(NOW) * 1000
    (directory / turn_name(2)).write(b"")
    assert (directory / turn_name(2)).stat().modified == int(NOW + 3) * 1000

    (directory / "draft-00000000").write(b"")
    assert not (directory / "draft-00000000").rename(directory / turn_name(2))
    assert directory.names() == ("draft-00000000", turn_name(2))
    with pytest.raises(StoreError) as absent:
        (directory / "draft-11111111").rename(directory / turn_name(3))
    assert absent.value.kind == "absent"


def test_a_lost_answer_is_no_lost_rename(directory: LeaseQueueDirectory, leases: Leases) -> None:
    (directory / NAME).write(b"")
    leases.failures = [(500, True)]
    assert (directory / NAME).rename(directory / turn_name(1))
    assert directory.names() == (turn_name(1),)


def test_a_retry_does_not_take_anothers_turn(
    directory: LeaseQueueDirectory, root: LeaseQueueRoot, leases: Leases
) -> None:
    (directory / NAME).write(b"")
    (root / "default" / turn_name(1)).write(b"")
    leases.failures = [(503, False)]
    assert not (directory / NAME).rename(directory / turn_name(1))
    assert directory.names() == (NAME, turn_name(1))


def test_a_source_that_remains_is_deleted_later(
    directory: LeaseQueueDirectory, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_directory, "_RETRY_SECONDS", 0.0)
    (directory / NAME).write(b"")
    leases.failures = [None, (503, False)]
    assert (directory / NAME).rename(directory / turn_name(1))
    assert len(leases.leases) == 2
    leases.failures = [None, (503, False)]
    assert directory.names() == (turn_name(1),) and len(leases.leases) == 2
    assert directory.names() == (turn_name(1),) and len(leases.leases) == 1


def test_a_source_that_is_written_again_is_not_deleted(
    directory: LeaseQueueDirectory, leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_directory, "_RETRY_SECONDS", 0.0)
    (directory / NAME).write(b"")
    leases.failures = [None, (503, False)]
    assert (directory / NAME).rename(directory / turn_name(1))
    (directory / NAME).write(b"")
    assert directory.names() == (NAME, turn_name(1))


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_missing_permissions_are_told(
    directory: LeaseQueueDirectory, leases: Leases, method: str
) -> None:
    (directory / NAME).write(b"")
    leases.forbidden = {method}
    with pytest.raises(StoreError, match="Kubernetes refuses: it is Forbidden") as refusal:
        directory.entries()
        (directory / NAME).rename(directory / turn_name(1))
    assert refusal.value.kind == "permission"


@pytest.mark.parametrize("code", [429, 500, 503])
def test_an_overloaded_server_is_asked_again(
    directory: LeaseQueueDirectory, leases: Leases, code: int
) -> None:
    leases.failures = [(code, False)] * 2
    (directory / NAME).write(b"")
    leases.failures = [(code, True)] * 2
    (directory / NAME).write(b"")
    leases.failures = [(code, False)]
    assert directory.names() == (NAME,)
    leases.failures = [(code, False)] * 10_000
    with pytest.raises(StoreError, match=f"cannot list .*{NAMESPACE}.*Unavailable") as error:
        directory.entries()
    assert error.value.kind == "unreachable"


def test_a_server_that_is_gone_is_unreachable() -> None:
    with api_server() as gone:
        root = manager_of(gone).queue_root(("default",))
    for call in (root.entries, (root / "default").entries, (root / "default" / NAME).remove):
        with pytest.raises(StoreError) as error:
            call()
        assert error.value.kind == "unreachable"


def test_an_answer_of_unknown_form_is_an_error(server: ApiServer) -> None:
    server.answers = {f"GET {LEASES}": (200, {})}
    with pytest.raises(StoreError, match="has no items") as error:
        (manager_of(server).queue_root(("default",)) / "default").entries()
    assert error.value.kind == ""


def test_a_flooded_directory_is_not_read(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_directory, "_MAX_LEASES", 3)
    listed = [lease(turn_name(n)) for n in range(4)]
    directory = manager_of(server).queue_root(("default",)) / "default"
    server.answers = {f"GET {LEASES}": (200, list_of(listed[:3]))}
    assert len(directory.entries()) == 3
    server.answers = {f"GET {LEASES}": (200, list_of(listed))}
    with pytest.raises(StoreError, match="more than the 3 Leases"):
        directory.entries()


def test_partitions_do_not_see_each_other(root: LeaseQueueRoot) -> None:
    for partition in ("a", "b"):
        (root / partition / NAME).write(b"")
    (root / "a" / NAME).remove()
    assert (root / "a").names() == () and (root / "b").names() == (NAME,)


def test_versions_are_forgotten_in_time(
    directory: LeaseQueueDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_directory, "_MAX_REMEMBERED", 2)
    for number in (1, 2, 3, 1):
        (directory / turn_name(number)).write(b"")
    assert [*directory._written] == [turn_name(3), turn_name(1)]


def member(directory: LeaseQueueDirectory, leases: Leases, number: int = 1) -> QueueMember:
    return QueueMember(
        directory,
        application=f"spark-{number}",
        executors=2,
        gpus=1,
        clock=lambda: leases.now - NOW + 50,
    )


def test_a_gang_knows_the_servers_clock_and_is_never_early(
    directory: LeaseQueueDirectory, leases: Leases
) -> None:
    """A rename between two renewals must not change its opinion of the time."""
    one = member(directory, leases)
    one.file_ticket(one.ticket)
    for passed in range(3):
        leases.now += 1.3
        one.update_ticket(dataclasses.replace(one.ticket, passed=passed))
        one.poll()
        assert leases.now - 1.001 <= one._now() / 1000 <= leases.now
    assert one.take_turn(one.poll())
    leases.now += 3
    assert one.renew_turn()
    assert leases.now - 1.001 <= one._now() / 1000 <= leases.now
    one.leave()
    assert directory.names() == (turn_name(2),)


def test_gangs_of_one_second_have_an_order(
    directory: LeaseQueueDirectory, leases: Leases, root: LeaseQueueRoot
) -> None:
    members = [member(root / "default", leases, number) for number in range(3)]
    for one in members:
        one.file_ticket(one.ticket)
    orders = [[ticket for ticket, _ in one.poll().tickets] for one in members]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] == sorted((one.ticket for one in members), key=lambda ticket: ticket.id)


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("number", range(14))
def test_a_request_that_fails_once_changes_nothing(
    directory: LeaseQueueDirectory, leases: Leases, number: int, is_done: bool
) -> None:
    leases.failures = [*[None] * number, (503, is_done)]
    one = member(directory, leases)
    with queued(one):
        one.file_ticket(one.ticket)
        one.update_ticket(dataclasses.replace(one.ticket, bound=Bound.CLUSTER))
        assert one.take_turn(one.poll())
        assert one.poll().turn_holder is not None
        one.give_back_turn()
    assert directory.names() == (turn_name(2),)


def test_a_turn_of_a_crashed_gang_expires(root: LeaseQueueRoot, leases: Leases) -> None:
    crashed, later = (member(root / "default", leases, number) for number in range(2))
    crashed.file_ticket(crashed.ticket)
    assert crashed.take_turn(crashed.poll())
    with queued(later):
        later.file_ticket(later.ticket)
        leases.now += 19
        assert later.poll().turn_holder is not None
        leases.now += 2
        assert later.poll().turn_holder is None
        assert later.take_turn(later.poll())
        assert not crashed.renew_turn() and later.renew_turn()


def test_an_offer_stands(directory: LeaseQueueDirectory, leases: Leases) -> None:
    offer = StandingOffer(directory, application="spark-1", gpus=1, run="fit")
    with queued(member(directory, leases, 2)) as one:
        one.file_ticket(dataclasses.replace(one.ticket, bound=Bound.CLUSTER))
        assert offer.renew(3, 0, (queue_tag("q"),), 0, {}) == 2
        assert len(one.poll().offers) == 1
    offer.withdraw()
    assert directory.names() == ()


def test_a_reader_has_the_servers_clock(
    root: LeaseQueueRoot, directory: LeaseQueueDirectory, leases: Leases, server: ApiServer
) -> None:
    one = member(directory, leases)
    one.file_ticket(one.ticket)
    leases.now += 10
    server.requests.clear()
    queues, problems = GangQueueReader(root, lambda: 0.0).read()
    snapshot, now = queues["default"]
    assert [ticket.application for ticket, _ in snapshot.tickets] == ["spark-1"]
    assert now == int(leases.now) * 1000 and problems == [] and not root.is_local
    # A reader needs no other permission than to list.
    assert server.lines == [f"POST {SELF}", f"GET {LEASES}"]
    leases.now += 30
    assert GangQueueReader(root, lambda: 0.0).read()[0]["default"][0].tickets == ()
