"""The permissions of a user of hopsgpu, and what each is for. Pure.

kubernetes-objects/role.yaml and cluster-role.yaml grant exactly these; a test compares them.

Source: the Kubernetes documentation, "Using RBAC Authorization"; Spark's "Running Spark on
Kubernetes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hopsgpu.cluster_managers.kubernetes.kueue import GROUP as KUEUE

ROLE, CLUSTER_ROLE = "role.yaml", "cluster-role.yaml"


@dataclass(frozen=True)
class Permission:
    """A verb on a resource that an API server may allow, in the namespace or in the cluster."""

    verb: str
    resource: str
    group: str = ""
    is_of_cluster: bool = False
    subresource: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.object}"

    @property
    def object(self) -> str:
        """Return the resource with its subresource and its group."""
        name = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{name}{f'.{self.group}' if self.group else ''}"


@dataclass(frozen=True)
class PermissionRule:
    """Permissions with one purpose.

    Attributes:
        resource: such as "pods" or "pods/log".
        required: verbs without which gangs fail.
        purpose: what the required verbs are for.
        optional: verbs that gangs can do without.
        loss: what is lost without the optional verbs.
        is_of_kueue: whether only clusters with Kueue have the resource.
    """

    resource: str
    required: tuple[str, ...] = ()
    purpose: str = ""
    optional: tuple[str, ...] = ()
    loss: str = ""
    group: str = ""
    is_of_cluster: bool = False
    is_of_kueue: bool = False

    def permissions(self, verbs: tuple[str, ...]) -> Iterator[Permission]:
        resource, _, subresource = self.resource.partition("/")
        for verb in verbs:
            yield Permission(verb, resource, self.group, self.is_of_cluster, subresource)


_CLEANING = ("get", "list", "watch", "delete", "deletecollection")
RULES = (
    PermissionRule(
        "pods",
        ("create", "get", "list", "watch", "delete", "deletecollection"),
        "Spark creates, watches and deletes the pods of executors; hopsgpu lists a gang's pods, and"
        " deletes them at the release",
        ("patch",),
        "Spark cannot mark pods that it keeps after their end"
        " (spark.kubernetes.executor.deleteOnTermination=false)",
    ),
    PermissionRule(
        "configmaps",
        ("create",),
        "Spark puts the configuration of executors into a ConfigMap",
        ("patch", *_CLEANING),
        "spark-submit creates no drivers in pods (cluster mode), and ConfigMaps of ended"
        " applications remain",
    ),
    PermissionRule(
        "services",
        optional=("create", "patch", *_CLEANING),
        loss="spark-submit creates no drivers in pods (cluster mode)",
    ),
    PermissionRule(
        "networkpolicies",
        optional=("create", "patch", *_CLEANING),
        loss="spark-submit creates no drivers in pods (cluster mode)",
        group="networking.k8s.io",
    ),
    PermissionRule(
        "persistentvolumeclaims",
        optional=("create", "patch", *_CLEANING),
        loss="Spark cannot create volumes on demand, and does not remove them",
    ),
    PermissionRule(
        "events",
        optional=("get", "list"),
        loss="the error of a lost executor does not say that its pod was evicted or preempted",
    ),
    PermissionRule(
        "resourcequotas",
        ("list",),
        "hopsgpu compares a gang with the quotas of the namespace before it requests GPUs",
        ("get",),
        "`kubectl describe` does not show a quota that an error names",
    ),
    PermissionRule(
        "limitranges",
        ("list",),
        "hopsgpu compares a gang with the limit ranges of the namespace before it requests GPUs",
        ("get",),
        "`kubectl describe` does not show a limit range that an error names",
    ),
    PermissionRule(
        "pods/log",
        optional=("get",),
        loss="`kubectl logs` does not show the output of executors and of drivers in pods",
    ),
    PermissionRule(
        "leases",
        ("create", "get", "list", "update"),
        "a driver reports by its Lease that it lives, and reads those of other drivers",
        ("delete",),
        "Leases of applications that have ended remain",
        group="coordination.k8s.io",
    ),
    PermissionRule(
        "localqueues",
        ("list",),
        "hopsgpu looks for a LocalQueue of Kueue, in which gangs of the namespace wait",
        ("get",),
        "`kubectl describe` does not show a LocalQueue that a reason of a wait names",
        group=KUEUE,
        is_of_kueue=True,
    ),
    PermissionRule(
        "workloads",
        ("create", "get", "list", "watch", "delete"),
        "a gang is one Workload of Kueue, which hopsgpu deletes at the release",
        group=KUEUE,
        is_of_kueue=True,
    ),
    PermissionRule(
        "nodes",
        ("list",),
        "hopsgpu reads where GPUs are, and which nodes are ready",
        is_of_cluster=True,
    ),
    PermissionRule(
        "pods",
        optional=("list",),
        loss="hopsgpu takes GPUs of pods in other namespaces for free, and a gang may wait for pods"
        " that the scheduler cannot place",
        is_of_cluster=True,
    ),
    PermissionRule(
        "resourceflavors",
        optional=("get",),
        loss="pods of gangs do not get the labels and tolerations of the flavors of Kueue",
        group=KUEUE,
        is_of_cluster=True,
        is_of_kueue=True,
    ),
)


def all_permissions(*, has_kueue: bool) -> tuple[Permission, ...]:
    """Return the permissions of both roles that matter on a cluster."""
    return tuple(
        permission
        for rule in RULES
        if has_kueue or not rule.is_of_kueue
        for permission in rule.permissions((*rule.required, *rule.optional))
    )
