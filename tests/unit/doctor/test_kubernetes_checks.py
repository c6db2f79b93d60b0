"""The doctor's checks of Kubernetes, and their order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hopsgpu.cli.main import main
from hopsgpu.cluster_managers.kubernetes.limits import namespace_limit
from hopsgpu.cluster_managers.kubernetes.permissions import Permission, all_permissions
from hopsgpu.cluster_managers.kubernetes.pod_problems import find_problem
from hopsgpu.cluster_managers.resources import NOTHING, Amount
from hopsgpu.cluster_managers.snapshot import Node, Queue
from hopsgpu.doctor import facts as gather
from hopsgpu.doctor import kubernetes_checks, settings_checks
from hopsgpu.doctor.examination import Examination
from hopsgpu.doctor.kubernetes_checks import NODE_REMEDIES, AccessFacts, KubernetesFacts
from hopsgpu.doctor.kubernetes_probe import KubernetesProbe
from hopsgpu.doctor.probe_gang import ProbeResult
from hopsgpu.doctor.report import Check, CheckState
from hopsgpu.doctor.session_checks import check_gang
from hopsgpu.errors import GangTimeout
from tests.unit.cluster_managers.kubernetes.api_server import (
    ACCESS,
    NAMESPACE,
    ReceivedRequest,
    Reply,
    api_server,
    single,
)
from tests.unit.cluster_managers.kubernetes.cluster_objects import pod_value
from tests.unit.cluster_managers.kubernetes.kubeconfigs import write_kubeconfig
from tests.unit.doctor.test_checks import BIG, NODE, gpu_node, gpus, seen, state_of

MASTER = "k8s://https://api:6443"
LIMIT_CORES = "spark.kubernetes.executor.limit.cores"
EVERYTHING = dict.fromkeys(all_permissions(has_kueue=False), True)


def node(host: str, state: str = "RUNNING", health: str = "", total: Amount = BIG) -> Node:
    return Node(host, host, state, total, NOTHING, health=health)


def quota(most: Amount, used: Amount = NOTHING, largest: Amount = BIG) -> Queue:
    limit = namespace_limit("team", largest)
    return replace(limit, path="ResourceQuota team/gpus", maximum=most, used=used)


FACTS = KubernetesFacts(
    nodes=(node("a"), node("b")),
    gpus=replace(gpus(gpu_node("a"), gpu_node("b")), resource="nvidia.com/gpu"),
    limits=(namespace_limit("team", BIG),),
)


def without(*denied: Permission) -> dict[Permission, bool]:
    return {**EVERYTHING, **dict.fromkeys(denied, False)}


def test_credentials() -> None:
    access = AccessFacts("https://api:6443", "team", "/home/me/.kube/config", "training")
    check = kubernetes_checks.check_credentials(access)
    expected = "/home/me/.kube/config, context training: https://api:6443, namespace team"
    assert (check.state, check.seen) == ("ok", expected)
    pod = replace(access, origin="the pod's service account", context="")
    assert "service account: https" in kubernetes_checks.check_credentials(pod).seen
    check = kubernetes_checks.check_no_credentials("no credentials for https://api:6443")
    assert state_of(check, "no credentials", "KUBECONFIG") == "wrong"


def check_permissions(allowed: Mapping[Permission, bool], user: str = "alice") -> Check:
    return kubernetes_checks.check_permissions(allowed, user, "team")


def test_all_permissions() -> None:
    count = len(EVERYTHING)
    assert count > 40
    assert state_of(check_permissions(EVERYTHING), f"all {count} of role.yaml") == "ok"


def test_a_required_permission_is_missing() -> None:
    denied = (Permission("create", "pods"), Permission("patch", "pods"))
    check = check_permissions(without(*denied))
    assert state_of(check, "2 missing in the namespace team, 1 of them required") == "wrong"
    assert check.details[0].startswith("create pods: Spark creates")
    assert check.details[1].startswith("patch pods (optional): Spark cannot mark")
    assert "kubectl apply -n team -f kubernetes-objects/role.yaml; then make alice" in check.fix
    assert "kubectl apply -f kubernetes-objects/role-binding.yaml" in check.fix
    assert "cluster-role" not in check.fix
    nodes = check_permissions(without(Permission("list", "nodes", is_of_cluster=True)), "")
    assert state_of(nodes, "in the whole cluster: list nodes", "cluster-role.yaml") == "wrong"
    assert "make the user a subject" in nodes.fix and "role.yaml -n" not in nodes.fix


def test_an_optional_permission_is_missing() -> None:
    check = check_permissions(without(Permission("list", "pods", is_of_cluster=True)))
    assert state_of(check, "hopsgpu takes GPUs of pods in other namespaces for free") == "unknown"
    assert "cluster-role.yaml" in check.fix
    lease = Permission("delete", "leases", "coordination.k8s.io")
    check = check_permissions(without(lease))
    assert state_of(check, "delete leases.coordination.k8s.io (optional)") == "unknown"


def test_permissions_for_kueue_matter_only_with_kueue() -> None:
    with_kueue = dict.fromkeys(all_permissions(has_kueue=True), True)
    assert state_of(check_permissions(with_kueue), f"all {len(with_kueue)} of role.yaml") == "ok"
    create = Permission("create", "workloads", "kueue.x-k8s.io")
    check = check_permissions({**with_kueue, create: False})
    assert state_of(check, "1 missing", "role.yaml") == "wrong"
    assert check.details[0].startswith("create workloads.kueue.x-k8s.io: a gang is one Workload")


def test_gpus_of_the_nodes() -> None:
    check = kubernetes_checks.check_gpus(FACTS)
    assert state_of(check, "4 of nvidia.com/gpu on 2 nodes (a 2, b 2)") == "ok"
    none = replace(FACTS, nodes=(node("a", total=Amount(0, 8, 8)),))
    for words in ("device plugin", "spark.hopsgpu.gpu.resource"):
        assert state_of(kubernetes_checks.check_gpus(none), "no node has", words) == "wrong"


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        ("NOT READY", "kubectl describe node"),
        ("CORDONED", "kubectl uncordon"),
        ("TAINTED", "podTemplateFile"),
        ("NOT SELECTED", "node.selector"),
    ],
)
def test_nodes_that_are_not_used(state: str, fix: str) -> None:
    unused = node("b", state, "its reason")
    check = kubernetes_checks.check_gpus(replace(FACTS, nodes=(node("a"), unused)))
    assert state_of(check, f"2 of nvidia.com/gpu on 1 node (a 2); not used: b is {state}") == (
        "wrong" if state == "NOT READY" else "ok"
    )
    assert check.details == (f"b is {state}: its reason",)
    alone = kubernetes_checks.check_gpus(replace(FACTS, nodes=(unused, node("c", total=NOTHING))))
    assert state_of(alone, "(none)", fix) == "wrong"


def test_types_by_labels() -> None:
    assert state_of(kubernetes_checks.check_types(FACTS), "A100") == "ok"
    bare = replace(gpu_node("b"), types=())
    mixed = replace(FACTS, gpus=gpus(gpu_node("a"), bare))
    check = kubernetes_checks.check_types(mixed)
    assert state_of(check, "nvidia.com/gpu.product on b", "feature discovery") == "unknown"
    nothing = replace(FACTS, gpus=gpus(bare))
    assert state_of(kubernetes_checks.check_types(nothing), "no node has the label") == "ok"
    assert kubernetes_checks.check_types(replace(FACTS, gpus=gpus())).state == "unknown"


def check_quotas(*limits: Queue, **settings: str) -> Check:
    return kubernetes_checks.check_quotas(replace(FACTS, limits=limits or FACTS.limits), settings)


def test_quotas() -> None:
    assert state_of(check_quotas(), "none limits the GPUs") == "ok"
    large = Amount(16, 1000, 2**20)
    assert state_of(check_quotas(quota(large)), "none limits the GPUs") == "ok"
    small = quota(replace(large, gpus=3), Amount(1, 1, 1))
    assert state_of(check_quotas(small), "ResourceQuota team/gpus: 1 of 3 GPUs used") == "ok"
    none = check_quotas(quota(replace(large, gpus=0)))
    assert state_of(none, "team/gpus allows no GPU", "spark.kubernetes.namespace") == "wrong"
    used_up = check_quotas(quota(large, Amount(16, 1, 1)))
    assert state_of(used_up, "team/gpus leaves 0 GPUs", "raise the quota") == "unknown"
    memory = check_quotas(quota(large, Amount(1, 1, 2**21)))
    assert state_of(memory, "leaves 15 GPUs, 999 cores, 0 MiB, and") == "unknown"
    tight = check_quotas(namespace_limit("team", Amount(2, 8, 100)))
    assert state_of(tight, "limit ranges allow executors of at most", "limitranges") == "wrong"


def test_a_quota_of_limits_needs_limits() -> None:
    facts = replace(FACTS, quotas_with_cpu_limits=("team",))
    check = kubernetes_checks.check_quotas(facts, {})
    assert state_of(check, "team has limits.cpu", LIMIT_CORES) == "wrong"
    assert kubernetes_checks.check_quotas(facts, {LIMIT_CORES: "4"}).state == "ok"


def test_one_image_is_named() -> None:
    check = kubernetes_checks.check_image
    names = ("spark.kubernetes.container.image", "spark.kubernetes.executor.container.image")
    for name in (*names, "spark.hopsgpu.image"):
        assert state_of(check({name: "train:1"}), "train:1") == "ok"
    missing = check({})
    assert state_of(missing, "no setting names the image", f"{names[0]} (--image here)") == "wrong"
    two = check({"spark.hopsgpu.image": "a", names[0]: "b"})
    assert state_of(two, "spark.hopsgpu.image=a, but", "remove one") == "wrong"


def test_settings_are_those_of_the_image() -> None:
    image = {"spark.hopsgpu.image": "train:1"}
    assert settings_checks.check_settings(MASTER, image, {}, 2).state is CheckState.OK
    check = settings_checks.check_settings(MASTER, {}, {}, 2)
    assert state_of(check, "spark.kubernetes.container.image is not set") == "wrong"


def test_the_executors_python_is_that_of_the_image() -> None:
    conf = {"spark.master": MASTER, "spark.kubernetes.container.image": "train:1"}
    none = {"PATH": "/nowhere"}
    assert gather.machine_facts(none, conf).executors_python == "python3 in train:1"
    named = {**none, "PYSPARK_PYTHON": "/opt/python"}
    assert gather.machine_facts(named, conf).executors_python == "/opt/python in train:1"


def test_remedies_of_nodes_name_the_image_and_pods() -> None:
    other = replace(NODE, python="3.12.1", spark="4.0.0")
    found = seen(other, failed={"b": "ended"}, remedies=NODE_REMEDIES)
    fix = "build the image with Python 3.11 as python3"
    assert state_of(found["executor python"], "Python 3.12.1", fix) == "wrong"
    assert state_of(found["executor spark"], "", "build the image with Spark 4.3.0") == "wrong"
    for words in ("pullSecrets", "spark.driver.host", "NetworkPolicy"):
        assert state_of(found["discovery"], "b: ended", words) == "wrong"
    assert "yarn" not in " ".join(check.fix for check in found.values())


def test_a_gang_that_kubernetes_does_not_start() -> None:
    problem = find_problem([pod_value(phase="Pending", waiting=("ImagePullBackOff", "no host"))])
    assert problem is not None
    error = GangTimeout(f"0 of 2 executors arrived: {problem.sentence}", granted=0, wanted=2)
    check = check_gang(ProbeResult(error=error), NODE_REMEDIES)
    assert state_of(check, "cannot pull the image", "pullSecrets") == "wrong"
    slow = GangTimeout("0 of 2 executors arrived", granted=0, wanted=2)
    check = check_gang(ProbeResult(error=slow), NODE_REMEDIES)
    assert state_of(check, "0 of 2", "--seconds 180, because the first start") == "unknown"


def test_a_session_that_is_late_and_an_executor_that_ended() -> None:
    probe = KubernetesProbe(gpus(), (), {}, MASTER)
    starting: Any = None
    why, fix = probe.give_up("name", "it has not started within 9 s", starting)
    assert why.startswith("it has not started within 9 s") and MASTER in fix
    assert probe.exclude({}, ("a",)) is None
    reason = probe.end_reason("team/train-exec-1", "a")
    assert reason.endswith("kubectl logs --namespace team train-exec-1.")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An environment that names no cluster; the lake is a local directory."""
    names = ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "PYSPARK_GATEWAY_PORT")
    for name in (*names, "KUBECONFIG", "HOPSGPU_GPU_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOPSGPU_ROOT", f"file://{tmp_path}/root")
    monkeypatch.setenv("HOPSGPU_LOCKS", f"file://{tmp_path}/locks")
    yield tmp_path


BEFORE = ["java", "spark", "python", "hadoop conf", "credentials", "api server"]
OF_CLUSTER = ["user", "permissions", "gpus", "gpu types", "quotas"]
AFTER = ["image", "settings", "lake", "gang queue"]


def examine(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    answers: Mapping[str, Any] | None = None,
    is_stopped: bool = False,
    **conf: str,
) -> tuple[list[str], dict[str, Check]]:
    """Return the names of checks of a recorded API server in their order, and checks by name."""
    with api_server(answers) as server:
        monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(directory, server.url)))
        settings = {
            "spark.master": f"k8s://{server.url}",
            "spark.kubernetes.namespace": NAMESPACE,
            **conf,
        }
        examination = Examination(settings, True, 1.0)
        if not is_stopped:
            checks = list(examination.checks())
    if is_stopped:
        checks = list(examination.checks())
    return [check.name for check in checks], {check.name: check for check in checks}


def test_the_order_of_the_checks(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, checks = examine(bare, monkeypatch)
    assert names[:16] == [*BEFORE, *OF_CLUSTER, *AFTER, "session"]
    assert checks["credentials"].seen.endswith(f"namespace {NAMESPACE}")
    assert ", context here: http://127.0.0.1:" in checks["credentials"].seen
    assert checks["api server"].seen == "Kubernetes v1.34.4"
    assert checks["permissions"].state == checks["gpus"].state == "ok"
    assert checks["gpu types"].seen == "4 × Simulated A100; driver unknown"
    assert state_of(checks["quotas"], "at most 2 GPUs, 2 cores, 2048 MiB") == "wrong"
    assert checks["image"].state == "wrong"
    assert checks["session"].seen == "not tried: the image is not set"


def test_a_user_without_the_roles(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: ReceivedRequest) -> Reply:
        attributes = request.body["spec"]["resourceAttributes"]
        return single("denied" if attributes["resource"] == "configmaps" else "allowed")

    image = {"spark.kubernetes.container.image": "train:1"}
    _, checks = examine(bare, monkeypatch, {f"POST {ACCESS}": answer}, **image)
    assert state_of(checks["permissions"], "create configmaps", "role.yaml") == "wrong"
    assert checks["session"].seen == "not tried: required permissions are missing"
    forbidden = {"GET /api/v1/nodes": single("forbidden")}
    _, checks = examine(bare, monkeypatch, forbidden, **image)
    assert state_of(checks["gpus"], "Kubernetes refuses") == "unknown"
    assert checks["quotas"].seen == "the nodes are unknown"
    assert checks["session"].seen == "not tried: the nodes are unknown"


def test_an_api_server_that_does_not_answer(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, checks = examine(bare, monkeypatch, is_stopped=True)
    assert names[: len(BEFORE)] == BEFORE
    assert state_of(checks["api server"], "does not answer", "kubectl cluster-info") == "wrong"
    assert {checks[name].seen for name in OF_CLUSTER} == {"the API server does not answer"}
    assert checks["session"].seen == "not tried: the API server does not answer"


def test_without_credentials(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bare / "none"))
    checks = {c.name: c for c in Examination({"spark.master": MASTER}, True, 1.0).checks()}
    assert state_of(checks["credentials"], "cannot be used", "KUBECONFIG") == "wrong"
    assert checks["api server"].seen == checks["permissions"].seen == "there are no credentials"
    assert "gang queue" not in checks


def test_settings_that_cannot_be_read(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = {
        "spark.hopsgpu.gpu.resource": "gpu",
        "spark.kubernetes.executor.podTemplateFile": str(bare / "none.yaml"),
    }
    names, checks = examine(bare, monkeypatch, **conf)
    assert names.index("gpu resource") < names.index("pod template") < names.index("api server")
    assert state_of(checks["gpu resource"], "'gpu'", "spark.hopsgpu.gpu.resource") == "wrong"
    assert state_of(checks["pod template"], "cannot be read", "podTemplateFile") == "wrong"


def test_a_queue_is_refused_in_words_of_kubernetes(
    bare: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--master", MASTER, "--queue", "x"])
    said = capsys.readouterr().err
    assert "Kubernetes has no queues" in said and "spark.kubernetes.namespace" in said


def test_an_option_names_the_image(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bare / "none"))
    (bare / "spark-defaults.conf").write_text("spark.kubernetes.container.image other:1\n")
    monkeypatch.setenv("SPARK_CONF_DIR", str(bare))
    with pytest.raises(SystemExit):
        main(["doctor", "--master", MASTER, "--no-session", "--image", "train:2"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines if " image " in line] == ["train:2"]
