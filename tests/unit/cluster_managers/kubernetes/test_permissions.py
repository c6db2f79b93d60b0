"""The table of permissions, and the roles of kubernetes-objects/."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hopsgpu.cluster_managers.kubernetes.permissions import (
    CLUSTER_ROLE,
    ROLE,
    RULES,
    Permission,
    all_permissions,
)

OBJECTS = Path(__file__).parents[4] / "kubernetes-objects"


def granted_permissions(file: str) -> Iterator[Permission]:
    """Yield what a role in a file grants."""
    role = yaml.safe_load((OBJECTS / file).read_text())
    for rule in role["rules"]:
        assert set(rule) == {"apiGroups", "resources", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                name, _, subresource = resource.partition("/")
                is_of_cluster = role["kind"] == "ClusterRole"
                for verb in rule["verbs"]:
                    yield Permission(verb, name, group, is_of_cluster, subresource)


@pytest.mark.parametrize(("file", "is_of_cluster"), [(ROLE, False), (CLUSTER_ROLE, True)])
def test_the_table_has_what_the_roles_grant(file: str, is_of_cluster: bool) -> None:
    needed = [p for p in all_permissions(has_kueue=True) if p.is_of_cluster is is_of_cluster]
    assert Counter(needed) == Counter(granted_permissions(file))


def test_each_permission_has_a_purpose_or_a_loss() -> None:
    for rule in RULES:
        assert bool(rule.required) == bool(rule.purpose), rule.resource
        assert bool(rule.optional) == bool(rule.loss), rule.resource


def test_the_name_of_a_permission() -> None:
    assert str(Permission("get", "pods", subresource="log")) == "get pods/log"
    leases = Permission("list", "leases", "coordination.k8s.io")
    assert str(leases) == "list leases.coordination.k8s.io"
