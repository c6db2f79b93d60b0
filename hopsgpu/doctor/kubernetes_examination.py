"""The examination of Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import dataclass

from hopsgpu.cluster_managers.kubernetes.credentials import load_access
from hopsgpu.cluster_managers.kubernetes.gpu_resource import (
    DEFAULT_GPU_RESOURCE,
    SETTING,
    kubernetes_gpu_resource,
)
from hopsgpu.cluster_managers.kubernetes.kind import Kubernetes
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.nodes import NodeRules
from hopsgpu.cluster_managers.kubernetes.pod_template import TEMPLATE, node_rules
from hopsgpu.cluster_managers.manager_table import MASTER
from hopsgpu.doctor import kubernetes_checks, kubernetes_facts
from hopsgpu.doctor.cluster_examination import (
    NEEDS_KERBEROS,
    ClusterExamination,
    ExaminedCluster,
)
from hopsgpu.doctor.free_nodes import nodes_to_inspect
from hopsgpu.doctor.kubernetes_checks import KubernetesFacts
from hopsgpu.doctor.kubernetes_probe import KubernetesProbe
from hopsgpu.doctor.report import Check, CheckState, ok, unknown, wrong
from hopsgpu.errors import ConfigError, HopsGpuError

_OF_CLUSTER = (kubernetes_checks.GPUS, kubernetes_checks.TYPES, kubernetes_checks.QUOTAS)
_OF_USER = (kubernetes_checks.USER, kubernetes_checks.PERMISSIONS)
_NO_CREDENTIALS = "there are no credentials"
_SILENT = "the API server does not answer"
_NOT_PERMITTED = "required permissions are missing"
_NO_NODES = "the nodes are unknown"
_NO_IMAGE = "the image is not set"


@dataclass(frozen=True)
class KubernetesExamination(ClusterExamination):
    """The checks of Kubernetes; the Hadoop configuration is optional."""

    @property
    def lake_name(self) -> str:
        return "lake"

    def checks(self) -> Generator[Check, None, ExaminedCluster]:
        hadoop, root = yield from self.optional_hadoop_conf(
            Kubernetes.title, kubernetes_checks.SHARED_LAKE
        )
        manager, no_probe = yield from self._manager()
        facts = None
        if manager is None or no_probe:
            yield from (unknown(name, no_probe) for name in (*_OF_USER, *_OF_CLUSTER))
        else:
            is_permitted = yield from self._user(manager)
            facts = yield from self._cluster(manager)
            no_probe = _NO_NODES if facts is None else "" if is_permitted else _NOT_PERMITTED
        image = kubernetes_checks.check_image(self.settings)
        yield image
        if image.state is not CheckState.OK:
            no_probe = no_probe or _NO_IMAGE
        gpu_nodes = 0 if facts is None else len(facts.gpus.nodes)
        if root is None:
            return ExaminedCluster(hadoop, gpu_nodes, refusal=NEEDS_KERBEROS)
        probe = None
        if facts is not None and not no_probe:
            free, skipped = nodes_to_inspect(facts.nodes, facts.gpus)
            probe = KubernetesProbe(facts.gpus, free, skipped, self.settings[MASTER])
        return ExaminedCluster(
            hadoop, gpu_nodes, lake=root, manager=manager, probe=probe, no_probe=no_probe
        )

    def _manager(self) -> Generator[Check, None, tuple[KubernetesManager | None, str]]:
        """Yield the checks of the way to the API server; return a client, and why it is of no use.

        The reason is "" if the API server answers.
        """
        try:
            access = load_access(self.settings, os.environ)
        except ConfigError as error:
            yield kubernetes_checks.check_no_credentials(str(error))
            yield unknown(kubernetes_checks.SERVER, _NO_CREDENTIALS)
            return None, _NO_CREDENTIALS
        yield kubernetes_checks.check_credentials(
            kubernetes_facts.access_facts(access, self.settings)
        )
        gpu_resource, rules = DEFAULT_GPU_RESOURCE, NodeRules()
        try:
            gpu_resource = kubernetes_gpu_resource(self.settings, os.environ)
        except ConfigError as error:
            yield wrong("gpu resource", str(error), f"correct {SETTING}")
        try:
            rules = node_rules(self.settings, gpu_resource)
        except ConfigError as error:
            yield wrong("pod template", str(error), f"correct {TEMPLATE}")
        manager = KubernetesManager(access, gpu_resource=gpu_resource, rules=rules)
        try:
            version = manager.version()
        except HopsGpuError as error:
            yield kubernetes_checks.check_no_answer(str(error))
            return manager, _SILENT
        yield ok(kubernetes_checks.SERVER, f"Kubernetes {version}")
        return manager, ""

    def _user(self, manager: KubernetesManager) -> Generator[Check, None, bool]:
        """Yield the checks of the user; return whether no required permission is missing."""
        user = ""
        try:
            user = manager.caller()
            yield ok(kubernetes_checks.USER, user)
        except HopsGpuError as error:
            yield unknown(kubernetes_checks.USER, str(error))
        try:
            allowed = kubernetes_facts.allowed_permissions(manager)
        except HopsGpuError as error:
            yield unknown(kubernetes_checks.PERMISSIONS, str(error))
            return True
        check = kubernetes_checks.check_permissions(allowed, user, manager.namespace)
        yield check
        return check.state is not CheckState.WRONG

    def _cluster(
        self, manager: KubernetesManager
    ) -> Generator[Check, None, KubernetesFacts | None]:
        try:
            facts = kubernetes_facts.kubernetes_facts(manager)
        except HopsGpuError as error:
            yield unknown(_OF_CLUSTER[0], str(error))
            yield from (unknown(name, _NO_NODES) for name in _OF_CLUSTER[1:])
            return None
        yield kubernetes_checks.check_gpus(facts)
        yield kubernetes_checks.check_types(facts)
        yield kubernetes_checks.check_quotas(facts, self.settings)
        return facts
