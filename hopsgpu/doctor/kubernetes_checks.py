"""Checks of Kubernetes: credentials, permissions, GPUs of the nodes, quotas and the image. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.backends.spark.container_image import IMAGE as HOPSGPU_IMAGE
from hopsgpu.cluster_managers.cluster_gpus import ClusterGpus
from hopsgpu.cluster_managers.kubernetes.credentials import CONTEXT, NAMESPACE
from hopsgpu.cluster_managers.kubernetes.gpu_resource import SETTING
from hopsgpu.cluster_managers.kubernetes.kind import IMAGE as SPARK_IMAGE
from hopsgpu.cluster_managers.kubernetes.kind import image_of
from hopsgpu.cluster_managers.kubernetes.limits import CPU_LIMIT
from hopsgpu.cluster_managers.kubernetes.nodes import PRODUCT, RUNNING
from hopsgpu.cluster_managers.kubernetes.permissions import (
    CLUSTER_ROLE,
    ROLE,
    RULES,
    Permission,
    PermissionRule,
)
from hopsgpu.cluster_managers.resources import NOTHING
from hopsgpu.cluster_managers.snapshot import Node, Queue
from hopsgpu.doctor.free_nodes import CONTAINER
from hopsgpu.doctor.image_checks import IMAGE
from hopsgpu.doctor.node_checks import NodeRemedies
from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.units import count_of

CREDENTIALS, SERVER, USER, PERMISSIONS = "credentials", "api server", "user", "permissions"
GPUS, TYPES, QUOTAS = "gpus", "gpu types", "quotas"
LIMIT_CORES = "spark.kubernetes.executor.limit.cores"
SHARED_LAKE = (
    "the driver and all pods",
    "set spark.hopsgpu.root (HOPSGPU_ROOT) to a lake, or to a directory on a volume that the driver"
    " and all pods mount at the same path",
)
NODE_REMEDIES = NodeRemedies(
    discovery=(
        "pods of executors must start and reach the driver: check the image and its pull secrets"
        " (spark.kubernetes.container.image.pullSecrets), and that pods reach spark.driver.host,"
        " which a NetworkPolicy or a firewall may prevent; NVIDIA's container toolkit gives them"
        " nvidia-smi"
    ),
    spark="build the image with Spark {version}, or run the driver with the image's Spark",
    leases=(
        "build the image without this directory, or with mode 1777; or name another one with"
        " spark.executorEnv.HOPSGPU_LEASE_DIR"
    ),
    gang=(
        "fix what the message says; the image must exist, and nodes may need"
        " spark.kubernetes.container.image.pullSecrets to pull it; `kubectl describe pod` and"
        " `kubectl logs` show why a pod of an executor does not start, or ends"
    ),
    python=(
        "build the image with Python {version} as python3, or name its path in the image with"
        " spark.pyspark.python; or run the driver with the image's version"
    ),
    late=(
        "run hopsgpu doctor --seconds 180, because the first start on a node pulls the image; if"
        " pods then still wait, `kubectl describe pod` shows why; if they run, they do not reach"
        " spark.driver.host of this machine"
    ),
    refusal="Kubernetes does not start the executors",
)
_FILES = "kubernetes-objects"
_BROKEN = "NOT READY"


@dataclass(frozen=True)
class AccessFacts:
    """The credentials of the session.

    Attributes:
        origin: the kubeconfig, or "the pod's service account".
        context: the context of the kubeconfig; "" in a pod.
    """

    address: str
    namespace: str
    origin: str
    context: str = ""


@dataclass(frozen=True)
class KubernetesFacts:
    """The state of the nodes, and the limits of the namespace.

    Attributes:
        limits: quotas of the namespace, as limits of executors.
        quotas_with_cpu_limits: names of quotas that refuse pods without a limit of cores.
    """

    nodes: tuple[Node, ...]
    gpus: ClusterGpus
    limits: tuple[Queue, ...]
    quotas_with_cpu_limits: tuple[str, ...] = ()


def check_no_credentials(error: str) -> Check:
    return wrong(
        CREDENTIALS,
        error,
        f"name the kubeconfig with KUBECONFIG and its context with {CONTEXT}; in a pod, give it a"
        " service account",
    )


def check_credentials(access: AccessFacts) -> Check:
    context = f", context {access.context}" if access.context else ""
    return ok(
        CREDENTIALS, f"{access.origin}{context}: {access.address}, namespace {access.namespace}"
    )


def check_no_answer(error: str) -> Check:
    return wrong(
        SERVER,
        error,
        "start the API server, or correct spark.master: `kubectl cluster-info` shows its address."
        " If it refuses the credentials, get new ones",
    )


def check_permissions(allowed: Mapping[Permission, bool], user: str, namespace: str) -> Check:
    """Check whether the caller has the permissions of both roles.

    Args:
        user: the name of the caller; "" if it is unknown.
    """
    required = list(_missing(allowed, is_required=True))
    optional = list(_missing(allowed, is_required=False))
    where = f"in the namespace {namespace}"
    details = [
        f"{_scope(rule)}{', '.join(verbs)} {_object(rule)}: {rule.purpose}"
        for rule, verbs in required
    ]
    details += [
        f"{_scope(rule)}{', '.join(verbs)} {_object(rule)} (optional): {rule.loss}"
        for rule, verbs in optional
    ]
    missing = [*required, *optional]
    count = sum(len(verbs) for _, verbs in missing)
    fix = _grant([rule for rule, _ in missing], user or "the user", namespace)
    if required:
        necessary = sum(len(verbs) for _, verbs in required)
        return wrong(
            PERMISSIONS, f"{count} missing {where}, {necessary} of them required", fix, details
        )
    if optional:
        return unknown(PERMISSIONS, f"{count} optional ones missing {where}", fix, details)
    return ok(PERMISSIONS, f"all {len(allowed)} of {ROLE} and {CLUSTER_ROLE} {where}")


def _missing(
    allowed: Mapping[Permission, bool], *, is_required: bool
) -> Iterator[tuple[PermissionRule, tuple[str, ...]]]:
    for rule in RULES:
        verbs = rule.required if is_required else rule.optional
        # Permissions for what the cluster does not have were not asked for.
        denied = [p.verb for p in rule.permissions(verbs) if not allowed.get(p, True)]
        if denied:
            yield rule, tuple(denied)


def _object(rule: PermissionRule) -> str:
    return f"{rule.resource}{f'.{rule.group}' if rule.group else ''}"


def _scope(rule: PermissionRule) -> str:
    return "in the whole cluster: " if rule.is_of_cluster else ""


def _grant(rules: Sequence[PermissionRule], user: str, namespace: str) -> str:
    """Return how an administrator grants the permissions."""
    commands = []
    if any(not rule.is_of_cluster for rule in rules):
        commands.append(f"kubectl apply -n {namespace} -f {_FILES}/{ROLE}")
    if any(rule.is_of_cluster for rule in rules):
        commands.append(f"kubectl apply -f {_FILES}/{CLUSTER_ROLE}")
    binding = f"{_FILES}/role-binding.yaml"
    return (
        f"as an administrator: {'; '.join(commands)}; then make {user} a subject in {binding}, with"
        f" the namespace {namespace}, and kubectl apply -f {binding}"
    )


def check_gpus(facts: KubernetesFacts) -> Check:
    """Check which nodes with GPUs executors can be scheduled on."""
    resource = facts.gpus.resource
    gpu_nodes = [node for node in facts.nodes if node.total.gpus]
    running = [node for node in gpu_nodes if node.state == RUNNING]
    unused = [node for node in gpu_nodes if node.state != RUNNING]
    if not gpu_nodes:
        ready = sum(node.state == RUNNING for node in facts.nodes)
        return wrong(
            GPUS,
            f"no node has {resource} ({count_of(ready, 'node')} running)",
            "install NVIDIA's device plugin (or GPU operator), so that nodes count"
            f" {resource}; if another resource counts the GPUs, name it with {SETTING}",
        )
    where = join_names(f"{node.host} {node.total.gpus}" for node in running)
    count = sum(node.total.gpus for node in running)
    seen = f"{count} of {resource} on {count_of(len(running), 'node')} ({where or 'none'})"
    if unused:
        names = join_names(f"{node.host} is {node.state}" for node in unused)
        seen += f"; not used: {names}"
    details = [f"{node.host} is {node.state}: {node.health}" for node in unused]
    if not running or any(node.state == _BROKEN for node in unused):
        return wrong(GPUS, seen, _node_remedies(unused), details)
    # A cordon, a taint or a selector is somebody's decision.
    return ok(GPUS, seen, details)


def _node_remedies(nodes: Sequence[Node]) -> str:
    remedies = {
        _BROKEN: "repair these nodes: `kubectl describe node` shows their conditions",
        "CORDONED": "kubectl uncordon the nodes",
        "TAINTED": "tolerate the taints, in spark.kubernetes.executor.podTemplateFile",
        "NOT SELECTED": (
            "change spark.kubernetes.executor.node.selector.* or the pod template, or label the"
            " nodes"
        ),
    }
    states = dict.fromkeys(node.state for node in nodes)
    return "; ".join(remedies[state] for state in states if state in remedies)


def check_types(facts: KubernetesFacts) -> Check:
    """Check whether labels name the types of GPUs, as placement by type requires."""
    if not facts.gpus.nodes:
        return unknown(TYPES, "no node has GPUs")
    if not facts.gpus.types:
        return ok(TYPES, f"no node has the label {PRODUCT}, by which gpu_type chooses")
    bare = [node.host for node in facts.gpus.nodes if not node.types]
    if bare:
        return unknown(
            TYPES,
            f"no label {PRODUCT} on {join_names(bare)}, so gpu_type cannot be used there",
            "install NVIDIA's GPU feature discovery, or set the label by hand",
        )
    drivers = join_names(sorted({node.driver for node in facts.gpus.nodes if node.driver}))
    return ok(TYPES, f"{join_names(map(str, facts.gpus.types))}; driver {drivers or 'unknown'}")


def check_quotas(facts: KubernetesFacts, settings: Mapping[str, str]) -> Check:
    """Check whether quotas and limit ranges of the namespace allow an executor with a GPU."""
    if facts.quotas_with_cpu_limits and not settings.get(LIMIT_CORES):
        names = join_names(facts.quotas_with_cpu_limits)
        return wrong(
            QUOTAS,
            f"{names} has {CPU_LIMIT}, and executors have no limit of cores: Kubernetes refuses"
            " their pods",
            f"set {LIMIT_CORES} to a number of cores, or remove {CPU_LIMIT} from the quota",
        )
    elsewhere = f"name another namespace with {NAMESPACE}"
    if none := [limit.path for limit in facts.limits if limit.maximum.gpus == 0]:
        return wrong(
            QUOTAS,
            f"{join_names(none)} allows no GPU",
            f"raise requests.{facts.gpus.resource} in it, or {elsewhere}",
        )
    largest = facts.limits[0].largest
    fitting = [n for n in facts.nodes if n.state == RUNNING and CONTAINER.is_within(n.total)]
    if fitting and not CONTAINER.is_within(largest):
        return wrong(
            QUOTAS,
            f"limit ranges allow executors of at most {largest}, and {CONTAINER} are needed",
            f"raise them (`kubectl get limitranges -o yaml`), or {elsewhere}",
        )
    free = {limit.path: (limit.maximum - limit.used).max_with(NOTHING) for limit in facts.limits}
    full = [
        f"{path} leaves {amount}"
        for path, amount in free.items()
        if not amount.capacity_for(CONTAINER)
    ]
    if full:
        return unknown(
            QUOTAS,
            f"{'; '.join(full)}, and {CONTAINER} are needed: gangs wait",
            f"wait, raise the quota, or {elsewhere}",
        )
    total = sum(node.total.gpus for node in facts.nodes if node.state == RUNNING)
    limited = [limit for limit in facts.limits if limit.maximum.gpus < total]
    if not limited:
        return ok(QUOTAS, "none limits the GPUs")
    return ok(
        QUOTAS,
        "; ".join(
            f"{limit.path}: {limit.used.gpus} of {count_of(limit.maximum.gpus, 'GPU')} used"
            for limit in limited
        ),
    )


def check_image(settings: Mapping[str, str]) -> Check:
    """Check whether exactly one image is named."""
    image, of_spark = settings.get(HOPSGPU_IMAGE), settings.get(SPARK_IMAGE)
    if image and of_spark not in (None, image):
        return wrong(
            IMAGE,
            f"{HOPSGPU_IMAGE}={image}, but {SPARK_IMAGE}={of_spark}",
            "remove one of them",
        )
    chosen = image_of(settings.get) or image
    if not chosen:
        return wrong(
            IMAGE,
            "no setting names the image of executors",
            f"set {SPARK_IMAGE} (--image here): docs/kubernetes.md shows how to build one",
        )
    return ok(IMAGE, chosen)
