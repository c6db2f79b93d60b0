"""Facts of Kubernetes, from its API server."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from hopsgpu.backends.inventory import Observer
from hopsgpu.cluster_managers.kubernetes.credentials import CONTEXT, ApiAccess
from hopsgpu.cluster_managers.kubernetes.limits import quotas_with_cpu_limits
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.permissions import Permission, all_permissions
from hopsgpu.doctor.kubernetes_checks import AccessFacts, KubernetesFacts

# As many connections as a client keeps.
_THREADS = 8


def access_facts(access: ApiAccess, settings: Mapping[str, str]) -> AccessFacts:
    return AccessFacts(
        access.address,
        access.namespace,
        access.origin,
        settings.get(CONTEXT) or _current_context(access.origin),
    )


def _current_context(file: str) -> str:
    """Return the name of the current context of a kubeconfig; "" if it is none."""
    from kubernetes import config

    try:
        return str(config.list_kube_config_contexts(file)[1]["name"])
    except (config.ConfigException, OSError):  # the service account of a pod
        return ""


def allowed_permissions(manager: KubernetesManager) -> dict[Permission, bool]:
    """Ask for each permission of the roles whether the caller has it.

    Raises:
        HopsGpuError: the API server does not answer, or refuses the question.
    """
    permissions = all_permissions(has_kueue=manager.has_kueue())
    with ThreadPoolExecutor(_THREADS) as threads:
        return dict(zip(permissions, threads.map(manager.is_allowed, permissions), strict=True))


def kubernetes_facts(manager: KubernetesManager) -> KubernetesFacts:
    """Return the state of nodes and quotas.

    Raises:
        HopsGpuError: the API server does not answer, or refuses the caller.
    """
    observer = Observer(manager)
    overview = observer.overview()
    return KubernetesFacts(
        nodes=overview.nodes,
        # Labels of nodes name the GPUs, so nodes without a web address are described too.
        gpus=observer.gpus(overview, manager.devices(overview.nodes)),
        limits=overview.user_snapshots[""][0].queues,
        quotas_with_cpu_limits=tuple(quotas_with_cpu_limits(manager.quotas())),
    )
