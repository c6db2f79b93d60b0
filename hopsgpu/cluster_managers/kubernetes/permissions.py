"""The permissions of a user of hopsgpu, and what each is for. Pure.

kubernetes-objects/role.yaml and cluster-role.yaml grant exactly these; a test compares them.

Source: the Kubernetes documentation, "Using RBAC Authorization"; Spark's "Running Spark on
Kubernetes".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """

    resource: str
    required: tuple[str, ...] = ()
    purpose: str = ""
    optional: tuple[str, ...] = ()
    loss: str = ""
    group: str = ""
    is_of_cluster: bool = False

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
)


def all_permissions() -> tuple[Permission, ...]:
    """Return the permissions of both roles."""
    return tuple(
        permission
        for rule in RULES
        for permission in rule.permissions((*rule.required, *rule.optional))
    )
