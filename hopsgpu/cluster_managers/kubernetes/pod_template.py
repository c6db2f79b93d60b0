"""The pod template of executors: the user's, and what gangs need besides.

Spark builds each executor's pod from a template in a file, and adds its own settings. A gang's
template adds the rules by which the scheduler chooses nodes, for as long as the gang acquires
executors.

Source: Spark's documentation, "Running Spark on Kubernetes" (Pod Template); the Kubernetes
documentation, "Downward API", "emptyDir" and "Assigning Pods to Nodes".
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hopsgpu.cluster_managers.flavors import NO_FLAVORS, Flavors
from hopsgpu.cluster_managers.kubernetes.nodes import (
    PRODUCT,
    NodeRules,
    Toleration,
    toleration_of,
)
from hopsgpu.cluster_managers.kubernetes.pods import APPLICATION, PROFILE, list_of, mapping_of
from hopsgpu.core.bounded_reads import read_file
from hopsgpu.core.container_ids import NAMESPACE, NODE, POD
from hopsgpu.errors import ConfigError

TEMPLATE = "spark.kubernetes.executor.podTemplateFile"
_CONTAINER = "spark.kubernetes.executor.podTemplateContainerName"
_LIMIT_CORES = "spark.kubernetes.executor.limit.cores"
_ACCOUNT = "spark.kubernetes.authenticate.{}.serviceAccountName"
# Spark takes the driver's service account if the executors have none.
_ACCOUNTS = (_ACCOUNT.format("executor"), _ACCOUNT.format("driver"))
_SELECTORS = ("spark.kubernetes.node.selector.", "spark.kubernetes.executor.node.selector.")
# Spark's name of the container of an executor.
_DEFAULT_CONTAINER = "spark-kubernetes-executor"
_SHM, _SHM_VOLUME = "/dev/shm", "hopsgpu-shm"
DISCOVERY_PATH = "/opt/hopsgpu/discover-gpus"
_DISCOVERY_VOLUME, _DISCOVERY_ANNOTATION = "hopsgpu-discovery", "hopsgpu/discover-gpus"
_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_OF_PODS: Mapping[str, Any] = {_REQUIRED: [{}], _PREFERRED: [{}]}
# The form of what hopsgpu reads or extends: a mapping with some of its keys, or a list of items.
_FORM: Mapping[str, Any] = {
    "metadata": {"annotations": {}},
    "spec": {
        "nodeSelector": {},
        "tolerations": [{}],
        "volumes": [{}],
        "containers": [{"env": [{}], "volumeMounts": [{}]}],
        "affinity": {
            "nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [{}]}]}},
            "podAffinity": _OF_PODS,
            "podAntiAffinity": _OF_PODS,
        },
    },
}
# Spark runs this script when an executor starts: the kubelet has chosen the GPUs before. A script
# of a few lines needs only a shell in the image.
_DISCOVERY_SCRIPT = """#!/bin/sh
# Lists the GPUs of this container for Spark.
smi=${HOPSGPU_NVIDIA_SMI:-nvidia-smi}
if gpus=$("$smi" --query-gpu=uuid --format=csv,noheader 2>/dev/null) && [ -n "$gpus" ]; then :
else gpus=$(echo "$NVIDIA_VISIBLE_DEVICES" | tr , '\\n'); fi
addresses=
for gpu in $gpus; do addresses="$addresses${addresses:+, }\\"$gpu\\""; done
echo "{\\"name\\": \\"NAME\\", \\"addresses\\": [$addresses]}"
"""


@dataclass(frozen=True)
class Placing:
    """Where the executors of a gang may run.

    Attributes:
        hosts: names of the nodes that they may use; None for all.
        excluded_hosts: names of nodes that they must not use.
        placement: "spread" for different nodes, "pack" for few of them, or None.
        application: the ID of their application, which distinguishes them from those of others.
        profile: the ID of their resource profile, which distinguishes them from other pods.
        gpu_resource: the resource whose taint they tolerate; "" for executors without GPUs.
        flavors: the nodes on which Kueue has admitted them.
    """

    hosts: frozenset[str] | None
    excluded_hosts: frozenset[str]
    placement: str | None
    application: str
    profile: int
    gpu_resource: str
    flavors: Flavors = NO_FLAVORS


def spark_resource(gpu_resource: str) -> tuple[str, str]:
    """Return Spark's vendor and name of a resource of Kubernetes."""
    vendor, _, name = gpu_resource.partition("/")
    return vendor, name


def read_template(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's pod template; a minimal one without any.

    Keys without a value are left out where hopsgpu reads or extends their values.

    Raises:
        ConfigError: the file cannot be read, has no pod, or a part of the pod has another form.
    """
    file = properties.get(TEMPLATE, "").strip()
    if not file:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": {}}
    where = f"{TEMPLATE}={file}"
    try:
        content = yaml.safe_load(read_file(Path(file.removeprefix("file://"))))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("kind") != "Pod":
        raise ConfigError(f"{where}: must have a Pod (kind: Pod) in YAML")
    return {"metadata": {}, "spec": {}, **_check_form(content, _FORM, where, "")}


def _check_form(value: Any, form: Any, where: str, name: str) -> Any:
    """Return a part of a template without the keys that have no value.

    Raises:
        ConfigError: it has another form; the message begins with `where`, and has its name.
    """
    if isinstance(form, list):
        if not isinstance(value, list):
            raise ConfigError(f"{where}: {name} must be a list")
        return [_check_form(v, form[0], where, f"{name}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {name} must be a mapping")
    return {
        key: _check_form(v, form[key], where, f"{name}.{key}".lstrip(".")) if key in form else v
        for key, v in value.items()
        if v is not None or key not in form
    }


def node_rules(properties: Mapping[str, str], gpu_resource: str) -> NodeRules:
    """Return the rules of an application's executors with GPUs, by its properties and template."""
    spec = mapping_of(read_template(properties), "spec")
    selector = {str(k): str(v) for k, v in mapping_of(spec, "nodeSelector").items()}
    for prefix in _SELECTORS:
        selector |= {
            name.removeprefix(prefix): value
            for name, value in properties.items()
            if name.startswith(prefix)
        }
    return NodeRules(
        selector,
        (
            Toleration(gpu_resource, "Exists"),
            *map(toleration_of, list_of(spec, "tolerations")),
        ),
    )


def executor_template(properties: Mapping[str, str], gpu_resource: str) -> dict[str, Any]:
    """Return the template of all executors of an application.

    The template names pod and node in variables, and mounts the script that lists the container's
    GPUs. It also mounts memory for data that processes share: by default a container has 64 MiB.
    A template that has all of this already gets it once.
    """
    template = copy.deepcopy(read_template(properties))
    script = _DISCOVERY_SCRIPT.replace("NAME", spark_resource(gpu_resource)[1])
    template["metadata"].setdefault("annotations", {})[_DISCOVERY_ANNOTATION] = script
    spec = template["spec"]
    container = _container(spec, properties.get(_CONTAINER) or _DEFAULT_CONTAINER)
    variables = container.setdefault("env", [])
    _set_by_name(variables, _from_field(POD, "metadata.name"))
    _set_by_name(variables, _from_field(NAMESPACE, "metadata.namespace"))
    _set_by_name(variables, _from_field(NODE, "spec.nodeName"))
    mounts, volumes = container.setdefault("volumeMounts", []), spec.setdefault("volumes", [])
    paths = [posixpath.normpath(str(mount.get("mountPath"))) for mount in mounts]
    if _SHM not in paths:
        _set_by_name(mounts, {"name": _SHM_VOLUME, "mountPath": _SHM})
        _set_by_name(volumes, {"name": _SHM_VOLUME, "emptyDir": {"medium": "Memory"}})
    directory, _, name = DISCOVERY_PATH.rpartition("/")
    _set_by_name(mounts, {"name": _DISCOVERY_VOLUME, "mountPath": directory, "readOnly": True})
    field = {"fieldPath": f"metadata.annotations['{_DISCOVERY_ANNOTATION}']"}
    items = [{"path": name, "fieldRef": field, "mode": 0o555}]
    _set_by_name(volumes, {"name": _DISCOVERY_VOLUME, "downwardAPI": {"items": items}})
    return template


def gang_template(template: Mapping[str, Any], placing: Placing) -> dict[str, Any]:
    """Return the template with the rules by which the scheduler chooses a gang's nodes."""
    placed = copy.deepcopy(dict(template))
    spec = placed["spec"]
    if placing.gpu_resource:
        toleration = {"key": placing.gpu_resource, "operator": "Exists"}
        _add_new(spec.setdefault("tolerations", []), [toleration])
    if placing.flavors.tolerations:
        _add_new(spec.setdefault("tolerations", []), placing.flavors.tolerations)
    if placing.flavors.labels:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **placing.flavors.labels}
    affinity = spec.setdefault("affinity", {})
    expressions = []
    if placing.hosts is not None:
        expressions.append(_hostname("In", sorted(placing.hosts)))
    if placing.excluded_hosts:
        expressions.append(_hostname("NotIn", sorted(placing.excluded_hosts)))
    if expressions:
        _require_nodes(affinity.setdefault("nodeAffinity", {}), expressions)
    # Each application counts its profiles from 0.
    labels = {APPLICATION: placing.application, PROFILE: str(placing.profile)}
    same_gang = {"topologyKey": _HOSTNAME, "labelSelector": {"matchLabels": labels}}
    if placing.placement == "spread":
        rules = affinity.setdefault("podAntiAffinity", {})
        _add_new(rules.setdefault(_REQUIRED, []), [same_gang])
    elif placing.placement == "pack":
        rules = affinity.setdefault("podAffinity", {})
        preference = {"weight": 100, "podAffinityTerm": same_gang}
        _add_new(rules.setdefault(_PREFERRED, []), [preference])
    return placed


def example_pod(
    template: Mapping[str, Any],
    properties: Mapping[str, str],
    image: str | None,
    requests: Mapping[str, str],
) -> dict[str, Any]:
    """Return an executor's pod as Spark would build it, as far as the API server checks pods.

    Args:
        requests: what its container requests, by resource.
    """
    pod = copy.deepcopy(dict(template))
    pod["metadata"] = {**pod["metadata"], "generateName": "hopsgpu-example-"}
    pod["metadata"].pop("name", None)
    spec = pod["spec"]
    spec["restartPolicy"] = "Never"
    if account := next(filter(None, map(properties.get, _ACCOUNTS)), None):
        spec["serviceAccountName"] = account
    container = _container(spec, properties.get(_CONTAINER) or _DEFAULT_CONTAINER)
    limits = {name: amount for name, amount in requests.items() if name != "cpu"}
    if cores := properties.get(_LIMIT_CORES):
        limits["cpu"] = cores
    container.update(image=image, resources={"requests": dict(requests), "limits": limits})
    return pod


def admission_template(
    template: Mapping[str, Any],
    selector: Mapping[str, str],
    gpu_resource: str,
    types: Sequence[str],
) -> dict[str, Any]:
    """Return the template with the rules that Kueue compares with the nodes of its flavors.

    Args:
        selector: labels that nodes must have, also those of Spark's properties.
        gpu_resource: the resource whose taint the pods tolerate; "" for pods without GPUs.
        types: labels of the types of GPUs that nodes may have; empty for all.
    """
    ruled = copy.deepcopy(dict(template))
    spec = ruled["spec"]
    spec["nodeSelector"] = dict(selector)
    if gpu_resource:
        toleration = {"key": gpu_resource, "operator": "Exists"}
        _add_new(spec.setdefault("tolerations", []), [toleration])
    if types:
        affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        _require_nodes(affinity, [{"key": PRODUCT, "operator": "In", "values": list(types)}])
    return ruled


def _require_nodes(affinity: dict[str, Any], expressions: Sequence[Mapping[str, Any]]) -> None:
    required = affinity.setdefault(_REQUIRED, {})
    terms: list[dict[str, Any]] = required.setdefault("nodeSelectorTerms", [])
    if not terms:
        terms.append({})
    # A node needs to match one of the terms, so each term gets the expressions.
    for term in terms:
        _add_new(term.setdefault("matchExpressions", []), expressions)


def _set_by_name(items: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item to a list in which names are unique, in the place of one of its name."""
    items[:] = [other for other in items if other.get("name") != item["name"]]
    items.append(item)


def _add_new(items: list[dict[str, Any]], more: Sequence[Mapping[str, Any]]) -> None:
    """Add those items to a list that it does not have."""
    items.extend(dict(item) for item in more if item not in items)


def _hostname(operator: str, values: Sequence[str]) -> dict[str, Any]:
    return {"key": _HOSTNAME, "operator": operator, "values": list(values)}


def _from_field(variable: str, field: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the executor's container of a template; create it if the template has none."""
    containers: list[dict[str, Any]] = spec.setdefault("containers", [])
    for container in containers:
        if container.get("name") == name:
            return container
    # As Spark: without a container of this name, it takes the first one.
    if not containers:
        containers.append({"name": name})
    return containers[0]
