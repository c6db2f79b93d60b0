"""The client of standalone masters over recorded answers, and over masters that do not answer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.backends.inventory import cluster_gpus
from hopsgpu.cluster_managers.capacity import check_possible
from hopsgpu.cluster_managers.demand import Demand
from hopsgpu.cluster_managers.http_client import NotUnderstood
from hopsgpu.cluster_managers.manager import HeldExecutors
from hopsgpu.cluster_managers.node_gpu_list import Devices
from hopsgpu.cluster_managers.request_without_room import why_request_without_room
from hopsgpu.cluster_managers.resources import Amount
from hopsgpu.cluster_managers.shortage import shortage
from hopsgpu.cluster_managers.snapshot import App, Snapshot
from hopsgpu.cluster_managers.standalone.manager import StandaloneManager, configured_manager
from hopsgpu.cluster_managers.wait_message import shortage_reason
from hopsgpu.core.queue_policy import Bound
from hopsgpu.core.run_record import ApplicationReport
from hopsgpu.errors import CapacityError, ConfigError, HopsGpuError
from hopsgpu.storage.identity import own_name
from tests.unit.cluster_managers.standalone import masters
from tests.unit.cluster_managers.standalone.masters import MALLORYS, OURS, manager_of
from tests.unit.rest import serving

NOW = 1796051500.0
ONE_GPU = Amount(1, 1, 512)
UNKNOWN = "app-20260101000000-0009"


def test_what_the_master_is_called() -> None:
    manager = StandaloneManager("spark://h2:7077,h1:7077", ("http://h1:8080", "http://h2:8080"))
    assert (manager.title, manager.gpu_resource) == ("the Spark master", "gpu")
    assert manager.cluster == "spark-h1-7077-h2-7077"
    assert manager.pages == "http://h1:8080"
    assert manager.application_page(OURS) == f"http://h1:8080/app/?appId={OURS}"
    assert manager.caller() == own_name()
    assert not manager.are_gpus_ending()


def test_nodes_have_no_products() -> None:
    with serving(masters.answers("gang")) as daemon:
        manager = manager_of(daemon)
        answers = manager.devices(manager.nodes())
    assert answers.devices == {masters.FIRST: Devices((), ""), masters.SECOND: Devices((), "")}
    assert not answers.problems


def snapshot_of(name: str, **options: Any) -> Snapshot:
    with serving(masters.answers(name)) as daemon:
        return manager_of(daemon, **options).snapshot(OURS, "alice")


def test_a_snapshot_has_what_each_application_has() -> None:
    snapshot = snapshot_of("two_profiles")
    assert snapshot.application_id == OURS and not snapshot.problems
    assert snapshot.applications == (
        App(
            MALLORYS, masters.NAME_OF_MALLORYS, "mallory", "", Amount(1, 1, 512), 1796051228.354, 1
        ),
        App(OURS, "gang of alice", "root", "", Amount(3, 2, 1024), 1796051018.646, 2),
    )
    assert snapshot.largest == Amount(2, 6, 8192)
    assert (snapshot.master, snapshot.user.limit) == (None, None)


def test_pages_are_asked_for_only_while_a_gpu_is_used() -> None:
    with serving(masters.answers("killed")) as daemon:
        snapshot = manager_of(daemon).snapshot(OURS, "alice")
        assert daemon.asked == ["/json/"]
    assert [app.used for app in snapshot.applications] == [Amount(0, 0, 0)]


def test_what_ones_own_cpu_executors_hold_is_asked_for_without_gpus_too() -> None:
    answers = masters.answers("killed")
    answers["/json/"]["activeapps"][0]["cores"] = 2
    with serving(answers) as daemon:
        manager_of(daemon).snapshot(OURS, "alice")
        assert daemon.asked == ["/json/", f"/app/?appId={OURS}"]


def test_an_application_without_a_page_counts_with_its_cores() -> None:
    answers = masters.answers("two_profiles")
    answers[f"/app/?appId={MALLORYS}"] = (500, "broken")
    with serving(answers) as daemon:
        snapshot = manager_of(daemon).snapshot(OURS, "alice")
    assert snapshot.applications[0].used == Amount(0, 1, 0)
    (problem,) = snapshot.problems
    assert problem.startswith("hopsgpu does not know the GPUs of 1 application:")
    assert "HTTP 500" in problem


def test_at_most_64_pages_are_asked_for_and_ours_first() -> None:
    answers = masters.answers("two_profiles")
    mallorys = next(app for app in answers["/json/"]["activeapps"] if app["id"] == MALLORYS)
    answers["/json/"]["activeapps"] += [
        {**mallorys, "id": f"app-20261130150708-{n:04}", "cores": 9} for n in range(100, 170)
    ]
    with serving(answers) as daemon:
        snapshot = manager_of(daemon).snapshot(OURS, "alice")
        asked = {path for path in daemon.asked if path.startswith("/app/")}
    assert len(asked) == 64 and f"/app/?appId={OURS}" in asked
    assert (
        "the GPUs of 8 more applications: it asks the Spark master for at most 64 pages"
        in (snapshot.problems[-1])
    )


def test_an_application_that_is_not_active_is_named() -> None:
    with serving(masters.answers("finished")) as daemon:
        manager = manager_of(daemon)
        with pytest.raises(HopsGpuError, match=f"{OURS} has ended: FINISHED"):
            manager.snapshot(OURS, "alice")
        with pytest.raises(HopsGpuError, match=f"does not know {UNKNOWN}.*recoveryMode"):
            manager.snapshot(UNKNOWN, "alice")


def test_the_setting_of_the_application_is_the_only_bound_besides_the_nodes() -> None:
    snapshot = snapshot_of("killed", max_cores=2)
    check_possible(Demand(ONE_GPU, 2), snapshot)
    with pytest.raises(CapacityError) as error:
        check_possible(Demand(ONE_GPU, 3), snapshot)
    assert "can never fit: spark.cores.max allows at most 2 cores;" in str(error.value)
    with pytest.raises(CapacityError, match=r"or raise spark\.cores\.max"):
        check_possible(Demand(Amount(1, 3, 512), 1), snapshot)
    assert "queue" not in str(error.value)


def test_a_gang_that_waits_for_its_own_cores_is_told_so() -> None:
    snapshot = snapshot_of("two_profiles", max_cores=2)
    demand = Demand(Amount(0, 1, 512), 2)
    missing = shortage(demand, snapshot)
    assert (missing.bound, missing.lack) == (Bound.QUEUE, "cores in spark.cores.max")
    reason = shortage_reason(snapshot, demand, missing, 0, NOW)
    assert reason.sentence == ("The setting spark.cores.max allows at most 2 cores, 2 are in use")
    assert "used by this application (2 cores, 1024 MiB)" in reason.details
    assert "queue" not in str(reason) and "mallory" not in str(reason)
    assert why_request_without_room(demand, snapshot, missing) == ""


def test_without_a_setting_no_queue_is_named() -> None:
    snapshot = snapshot_of("two_profiles")
    demand = Demand(ONE_GPU, 2)
    missing = shortage(demand, snapshot)
    assert missing.bound is Bound.CLUSTER
    reason = shortage_reason(snapshot, demand, missing, 0, NOW)
    assert reason.sentence.startswith("Needs 2 GPUs, 0 are free")
    with pytest.raises(CapacityError) as never:
        check_possible(Demand(ONE_GPU, 9), snapshot)
    with pytest.raises(CapacityError) as on_no_node:
        check_possible(Demand(Amount(3, 1, 512), 1), snapshot)
    assert "fits on no node: node 127.0.0.1 has 2 GPUs" in str(on_no_node.value)
    for text in (str(reason), str(never.value), str(on_no_node.value)):
        assert "queue" not in text and "cores.max" not in text and "scheduler" not in text


def test_the_inventory_has_no_queues_but_what_a_user_could_get() -> None:
    with serving(masters.answers("gang")) as daemon:
        manager = manager_of(daemon)
        overview = manager.overview("bob")
        gpus = cluster_gpus(overview, manager.devices(overview.nodes), "bob", NOW)
    assert (gpus.total, gpus.used, gpus.free, gpus.unexplained) == (4, 2, 2, 0)
    assert (gpus.queues, gpus.obtainable, gpus.acls) == ((), 2, False)
    (user,) = gpus.users
    assert (user.id, user.queue, user.gpus, user.since) == (OURS, "", 2, None)
    assert user.hosts == {"127.0.0.1": 2}
    assert gpus.problems == ()


def test_the_gpus_of_a_dead_worker_are_unhealthy_and_nobody_has_them() -> None:
    with serving(masters.answers("dead")) as daemon:
        manager = manager_of(daemon)
        overview = manager.overview("bob")
        gpus = cluster_gpus(overview, manager.devices(overview.nodes), "bob", NOW)
    # A node of the same host lives, so the dead one counts as replaced.
    assert (gpus.total, gpus.used, gpus.unexplained) == (2, 2, 0)


@pytest.mark.parametrize(
    ("name", "profile", "held"),
    [
        (
            "gang",
            1,
            HeldExecutors({f"{OURS}/000000": "127.0.0.1", f"{OURS}/000001": "127.0.0.1"}, 0),
        ),
        ("gang", 2, HeldExecutors({}, 0)),
        ("killed", 1, HeldExecutors({}, 0)),
        ("two_profiles", 2, HeldExecutors({f"{OURS}/000002": "127.0.0.1"}, 0)),
        ("two_profiles", 3, HeldExecutors({f"{OURS}/000003": "127.0.0.1"}, 0)),
        # One executor of the two profiles is lost and requested again, by whom is not shown.
        ("dead", 2, HeldExecutors({f"{OURS}/000002": "127.0.0.1"}, 1)),
        ("dead", 3, HeldExecutors({}, 0)),
    ],
)
def test_held_executors(name: str, profile: int, held: HeldExecutors) -> None:
    with serving(masters.answers(name)) as daemon:
        assert manager_of(daemon).held_executors(OURS, profile) == held


def test_repeated_questions_for_held_executors_cost_one_request() -> None:
    with serving(masters.answers("gang")) as daemon:
        manager = manager_of(daemon)
        manager.held_executors(OURS, 1)
        daemon.asked.clear()
        manager.held_executors(OURS, 1)
        assert daemon.asked == [f"/app/?appId={OURS}"]


def test_held_executors_of_an_unknown_application_are_an_error() -> None:
    with (
        serving(masters.answers("gang")) as daemon,
        pytest.raises(HopsGpuError, match=f"does not know {UNKNOWN}"),
    ):
        manager_of(daemon).held_executors(UNKNOWN, 1)


def test_ends_and_reports() -> None:
    with serving(masters.answers("gang")) as daemon:
        manager = manager_of(daemon)
        assert manager.end_of(OURS) == ""
        assert manager.report(OURS) == ApplicationReport("RUNNING", "", has_ended=False)
        assert manager.ended_since(0.0) == {}
        daemon.answers = masters.answers("finished")
        assert manager.end_of(OURS).startswith("FINISHED: ")
        assert manager.report(OURS) == ApplicationReport("FINISHED", "", has_ended=True)
        assert manager.ended_since(1796051018.0 + 635) == {
            OURS: ApplicationReport("FINISHED", "", has_ended=True),
            MALLORYS: ApplicationReport("FINISHED", "", has_ended=True),
        }
        assert manager.ended_since(NOW * 2) == {}
        asked = len(daemon.asked)
        assert manager.report("application_1_0001") is None is manager.report("local-17")
        assert len(daemon.asked) == asked
        for ask in (manager.end_of, manager.report):
            with pytest.raises(HopsGpuError, match=f"does not know {UNKNOWN}"):
                ask(UNKNOWN)


def test_why_executors_were_lost() -> None:
    answers = masters.answers("dead")
    answers["/json/"]["workers"][1]["host"] = "node2"
    with serving(answers) as daemon:
        manager = manager_of(daemon)
        assert manager.why_lost(OURS, "exited", "127.0.0.1") == "exited"
        assert manager.why_lost(OURS, "", "127.0.0.1") == ""
        dead = manager.why_lost(OURS, "exited", "node2")
        assert dead.startswith("its worker is DEAD: ") and dead.endswith("; Spark says: exited")
        assert "spark.worker.timeout" in dead and "node2" in dead
        assert manager.why_lost(OURS, "", "node3").startswith("the master knows no worker on node3")
        answers["/json/"]["workers"][1]["state"] = "DECOMMISSIONED"
        assert "was decommissioned" in manager.why_lost(OURS, "", "node2")
        daemon.answers = masters.answers("finished")
        assert manager.why_lost(OURS, "", "node2") == f"{OURS} has ended: FINISHED"
        daemon.answers = {}
        assert "could not be asked about node2" in manager.why_lost(OURS, "", "node2")


def with_status(status: str) -> dict[str, Any]:
    return {**masters.answers("gang"), "/json/": {**masters.state("gang"), "status": status}}


def test_the_active_one_of_several_masters_is_asked_first(caplog: pytest.LogCaptureFixture) -> None:
    with serving(with_status("STANDBY")) as standby, serving(masters.answers("gang")) as active:
        manager = manager_of(standby, active)
        assert len(manager.nodes()) == 2
        assert manager.pages == active.url
        manager.nodes()
        assert (len(standby.asked), len(active.asked)) == (1, 2)
        # The standby master takes over.
        standby.answers, active.answers = masters.answers("gang"), with_status("STANDBY")
        active.answers[f"/app/?appId={OURS}"] = active.answers["/app/"]
        assert len(manager.held_executors(OURS, 1).containers) == 2
        assert manager.pages == standby.url


def test_the_page_of_a_master_that_died_comes_from_its_successor() -> None:
    with serving(masters.answers("gang")) as second:
        with serving(masters.answers("gang")) as first:
            manager = manager_of(first, second)
            manager.held_executors(OURS, 1)
        assert len(manager.held_executors(OURS, 1).containers) == 2
    assert manager.pages == second.url


def test_without_an_active_master_each_status_is_named() -> None:
    with serving(with_status("RECOVERING")) as one, serving(with_status("STANDBY")) as other:
        manager = StandaloneManager(
            masters.MASTER, (one.url, "http://127.0.0.1:1", other.url), seconds=masters.SECONDS
        )
        with pytest.raises(HopsGpuError) as error:
            manager.nodes()
    assert str(error.value).startswith(
        f"no Spark master is ALIVE: {one.url} is RECOVERING; http://127.0.0.1:1 does not answer"
        f" (Connection refused); {other.url} is STANDBY."
    )


@pytest.mark.parametrize(
    "answer", [{"status": "ALIVE"}, [], (200, "[" * 100_000), (200, "<html>"), (302, "")]
)
def test_other_answers_are_errors(answer: Any) -> None:
    with serving({"/json/": answer}) as daemon, pytest.raises(HopsGpuError, match=daemon.url):
        manager_of(daemon).nodes()


def test_a_page_of_another_form_names_master_and_column() -> None:
    answers = masters.answers("gang")
    html = masters.page("gang").replace(">Resources</th>", ">GPUs</th>")
    answers[f"/app/?appId={OURS}"] = (200, html)
    with (
        serving(answers) as daemon,
        pytest.raises(NotUnderstood, match=f"at {daemon.url} answered /app/ .*column Resources"),
    ):
        manager_of(daemon).held_executors(OURS, 1)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("secret.token\n")
    file.chmod(0o600)
    return file


def test_a_token_is_sent_and_read_again(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(masters.answers("gang")) as daemon:
        manager = manager_of(daemon, token_file=token_file)
        manager.nodes()
        token_file.write_text("other.token")
        manager.nodes()
        assert daemon.tokens == ["Bearer secret.token", "Bearer other.token"]
    assert "secret" not in caplog.text


def test_a_token_wins_over_netrc(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ada password word\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    with serving(masters.answers("gang")) as daemon:
        manager_of(daemon, token_file=token_file).nodes()
        manager_of(daemon).nodes()
        assert daemon.tokens[0] == "Bearer secret.token"
        assert str(daemon.tokens[1]).startswith("Basic ")


def test_a_refusal_says_which_credentials_there_are(token_file: Path) -> None:
    with serving({"/json/": (403, "who?")}) as daemon:
        with pytest.raises(HopsGpuError) as error:
            manager_of(daemon).nodes()
        for words in ("spark.hopsgpu.master.token_file", "~/.netrc", "kinit", "HTTP 403"):
            assert words in str(error.value)
        with pytest.raises(HopsGpuError, match=f"refused the token of {token_file}"):
            manager_of(daemon, token_file=token_file).nodes()


def test_a_manager_is_configured_by_properties_and_variables() -> None:
    manager = configured_manager(
        masters.MASTER, {"spark.cores.max": "4"}, {"HOPSGPU_MASTER_UI": "http://h:1"}
    )
    assert manager.pages == "http://h:1"
    for cores in ("0", "-1", "four", "9" * 20):
        with pytest.raises(ConfigError, match=r"spark\.cores\.max="):
            configured_manager(masters.MASTER, {"spark.cores.max": cores}, {})
