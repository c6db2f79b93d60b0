"""Pod templates: the user's own one is kept, and gangs add their rules."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from hopsgpu.cluster_managers.kubernetes.nodes import Toleration
from hopsgpu.cluster_managers.kubernetes.pod_template import (
    DISCOVERY_PATH,
    TEMPLATE,
    Placing,
    example_pod,
    executor_template,
    gang_template,
    node_rules,
    read_template,
    spark_resource,
)
from hopsgpu.errors import ConfigError
from tests.unit.cluster_managers.kubernetes.cluster_objects import GPU

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
HOSTNAME = "kubernetes.io/hostname"
APPLICATION = "spark-1"
ANYWHERE = Placing(None, frozenset(), None, APPLICATION, 1, GPU)


def user_template(tmp_path: Path, **spec: Any) -> dict[str, str]:
    """Write a user's template; return the properties that name it."""
    file = tmp_path / "template.yaml"
    metadata = {"labels": {"team": "a"}, "annotations": {"own": "kept"}}
    content = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    file.write_text(yaml.safe_dump(content))
    return {TEMPLATE: str(file)}


def mounts_of(container: dict[str, Any]) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}


def required_terms(template: dict[str, Any]) -> Any:
    return template["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]


def in_nodes(operator: str, *names: str) -> dict[str, Any]:
    return {"key": HOSTNAME, "operator": operator, "values": list(names)}


def test_the_template_without_one_of_the_user() -> None:
    template = executor_template({}, GPU)
    (container,) = template["spec"]["containers"]
    assert container["name"] == "spark-kubernetes-executor"
    fields = {e["name"]: e["valueFrom"]["fieldRef"]["fieldPath"] for e in container["env"]}
    assert fields == {
        "HOPSGPU_POD": "metadata.name",
        "HOPSGPU_NAMESPACE": "metadata.namespace",
        "HOPSGPU_NODE": "spec.nodeName",
    }
    mounts = mounts_of(container)
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
    (item,) = volumes[mounts["/opt/hopsgpu"]]["downwardAPI"]["items"]
    assert f"/opt/hopsgpu/{item['path']}" == DISCOVERY_PATH and item["mode"] & 0o111
    (annotation,) = template["metadata"]["annotations"]
    assert item["fieldRef"]["fieldPath"] == f"metadata.annotations['{annotation}']"


def test_the_users_own_template_is_kept(tmp_path: Path) -> None:
    containers = [
        {"name": "sidecar"},
        {"name": "spark-kubernetes-executor", "env": [{"name": "A", "value": "1"}]},
    ]
    properties = user_template(tmp_path, containers=containers, priorityClassName="high")
    template = executor_template(properties, GPU)
    assert template["metadata"]["labels"] == {"team": "a"}
    assert template["metadata"]["annotations"]["own"] == "kept"
    assert template["spec"]["priorityClassName"] == "high"
    sidecar, executor = template["spec"]["containers"]
    assert sidecar == {"name": "sidecar"}
    assert executor["env"][0] == {"name": "A", "value": "1"} and len(executor["env"]) == 4


@pytest.mark.parametrize(("name", "index"), [("second", 1), ("first", 0), ("absent", 0), ("", 0)])
def test_the_container_of_executors_by_name(tmp_path: Path, name: str, index: int) -> None:
    properties = user_template(tmp_path, containers=[{"name": "first"}, {"name": "second"}])
    properties["spark.kubernetes.executor.podTemplateContainerName"] = name
    containers = executor_template(properties, GPU)["spec"]["containers"]
    assert ["env" in container for container in containers] == [index == 0, index == 1]


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/"])
def test_the_users_own_shared_memory_is_kept(tmp_path: Path, path: str) -> None:
    mine = {"name": "mine", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    container = {"name": "c", "volumeMounts": [{"name": "mine", "mountPath": path}]}
    properties = user_template(tmp_path, containers=[container], volumes=[mine])
    spec = executor_template(properties, GPU)["spec"]
    assert mounts_of(spec["containers"][0])[path] == "mine"
    assert len(spec["containers"][0]["volumeMounts"]) == 2
    assert [volume["name"] for volume in spec["volumes"]] == ["mine", "hopsgpu-discovery"]


def test_a_gang_tolerates_the_taint_of_its_resource(tmp_path: Path) -> None:
    team = {"key": "team", "operator": "Exists"}
    template = executor_template(user_template(tmp_path, tolerations=[team]), GPU)
    toleration = {"key": GPU, "operator": "Exists"}
    assert gang_template(template, ANYWHERE)["spec"]["tolerations"] == [team, toleration]
    without = Placing(None, frozenset(), None, APPLICATION, 1, "")
    assert gang_template(template, without)["spec"]["tolerations"] == [team]


def test_a_gang_that_may_run_anywhere_has_no_affinity() -> None:
    template = gang_template(executor_template({}, GPU), ANYWHERE)
    assert not template["spec"].get("affinity")


def test_hosts_and_excluded_hosts() -> None:
    placing = Placing(frozenset({"b", "a"}), frozenset({"c"}), None, APPLICATION, 1, GPU)
    terms = required_terms(gang_template(executor_template({}, GPU), placing))
    expressions = [in_nodes("In", "a", "b"), in_nodes("NotIn", "c")]
    assert terms == [{"matchExpressions": expressions}]


def test_no_hosts_are_no_nodes() -> None:
    placing = Placing(frozenset(), frozenset(), None, APPLICATION, 1, GPU)
    terms = required_terms(gang_template(executor_template({}, GPU), placing))
    assert terms == [{"matchExpressions": [in_nodes("In")]}]


def test_each_term_of_the_users_affinity_gets_the_rules(tmp_path: Path) -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    field = {"key": "metadata.name", "operator": "NotIn", "values": ["x"]}
    terms = [{"matchExpressions": [zone]}, {"matchFields": [field]}]
    preferred = [{"weight": 1, "preference": {"matchExpressions": [zone]}}]
    node_affinity = {REQUIRED: {"nodeSelectorTerms": terms}, PREFERRED: preferred}
    properties = user_template(tmp_path, affinity={"nodeAffinity": node_affinity})
    placing = Placing(frozenset({"a"}), frozenset(), None, APPLICATION, 1, GPU)
    template = gang_template(executor_template(properties, GPU), placing)
    rule = in_nodes("In", "a")
    assert required_terms(template) == [
        {"matchExpressions": [zone, rule]},
        {"matchFields": [field], "matchExpressions": [rule]},
    ]
    assert template["spec"]["affinity"]["nodeAffinity"][PREFERRED] == preferred


@pytest.mark.parametrize(
    ("placement", "kind", "strength"),
    [("spread", "podAntiAffinity", REQUIRED), ("pack", "podAffinity", PREFERRED)],
)
def test_a_placement_is_added_to_the_users_affinity(
    tmp_path: Path, placement: str, kind: str, strength: str
) -> None:
    users = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"team": "b"}}}
    properties = user_template(tmp_path, affinity={kind: {strength: [users]}})
    placing = Placing(None, frozenset(), placement, APPLICATION, 7, GPU)
    affinity = gang_template(executor_template(properties, GPU), placing)["spec"]["affinity"]
    first, rule = affinity[kind][strength]
    assert first == users and affinity.keys() == {kind}
    term = rule["podAffinityTerm"] if placement == "pack" else rule
    assert term["topologyKey"] == HOSTNAME
    assert term["labelSelector"]["matchLabels"] == {
        "spark-app-selector": APPLICATION,
        "spark-exec-resourceprofile-id": "7",
    }


@pytest.mark.parametrize("placement", ["spread", "pack"])
def test_what_hopsgpu_adds_is_added_once(tmp_path: Path, placement: str) -> None:
    placing = Placing(frozenset({"a"}), frozenset({"b"}), placement, APPLICATION, 1, GPU)
    template = gang_template(executor_template({}, GPU), placing)
    (tmp_path / "template.yaml").write_text(yaml.safe_dump(template))
    again = executor_template({TEMPLATE: str(tmp_path / "template.yaml")}, GPU)
    assert again == template
    assert gang_template(again, placing) == template


def test_a_gang_leaves_the_template_of_others_as_it_was(tmp_path: Path) -> None:
    template = executor_template(user_template(tmp_path, tolerations=[], affinity={}), GPU)
    before = json.dumps(template)
    gang_template(
        template, Placing(frozenset({"a"}), frozenset({"b"}), "spread", APPLICATION, 1, GPU)
    )
    assert json.dumps(template) == before


def test_a_template_is_written_as_plain_yaml() -> None:
    placing = Placing(frozenset({"a"}), frozenset({"b"}), "pack", APPLICATION, 1, GPU)
    template = gang_template(executor_template({}, GPU), placing)
    assert yaml.safe_load(yaml.safe_dump(template)) == template


def test_a_file_may_be_a_url(tmp_path: Path) -> None:
    properties = user_template(tmp_path, priorityClassName="high")
    properties[TEMPLATE] = f"file://{properties[TEMPLATE]}"
    assert read_template(properties)["spec"] == {"priorityClassName": "high"}
    assert read_template({TEMPLATE: " "})["spec"] == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"kind: [", "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"kind: Pod\n---\nkind: Pod\n", "cannot be read"),
        (b"", "must have a Pod"),
        (b"[1]", "must have a Pod"),
        (b"kind: Deployment", "must have a Pod"),
        (b"kind: Pod\nspec: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "template.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"podTemplateFile={file}: {reason}"):
        read_template({TEMPLATE: str(file)})


@pytest.mark.parametrize(
    "content",
    [
        "metadata:",
        "spec:",
        "metadata: {annotations: }",
        "spec: {containers: [{name: x, env: , volumeMounts: }]}",
        "spec: {containers: , volumes: , tolerations: , affinity: , nodeSelector: }",
        "spec: {affinity: {nodeAffinity: , podAntiAffinity: }}",
        f"spec: {{affinity: {{nodeAffinity: {{{REQUIRED}: }}}}}}",
        f"spec: {{affinity: {{podAntiAffinity: {{{REQUIRED}: }}}}}}",
        f"spec: {{affinity: {{nodeAffinity: {{{REQUIRED}: {{nodeSelectorTerms: }}}}}}}}",
    ],
)
def test_a_key_without_a_value_is_as_if_absent(tmp_path: Path, content: str) -> None:
    (tmp_path / "template.yaml").write_text(f"apiVersion: v1\nkind: Pod\n{content}\n")
    template = executor_template({TEMPLATE: str(tmp_path / "template.yaml")}, GPU)
    template["spec"]["containers"][0]["name"] = "spark-kubernetes-executor"
    placing = Placing(frozenset({"a"}), frozenset(), "spread", APPLICATION, 1, GPU)
    without = executor_template({}, GPU)
    assert gang_template(template, placing) == gang_template(without, placing)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("metadata: 1", "metadata must be a mapping"),
        ("spec: [1]", "spec must be a mapping"),
        ("spec: {containers: x}", "spec.containers must be a list"),
        ("spec: {containers: [{}, null]}", r"spec.containers\[1\] must be a mapping"),
        ("spec: {containers: [{env: {A: b}}]}", r"spec.containers\[0\].env must be a list"),
        ("spec: {tolerations: [a]}", r"spec.tolerations\[0\] must be a mapping"),
        ("spec: {nodeSelector: [a]}", "spec.nodeSelector must be a mapping"),
        ("spec: {affinity: {nodeAffinity: []}}", "spec.affinity.nodeAffinity must be a mapping"),
    ],
)
def test_a_part_of_another_form_is_refused_by_name(
    tmp_path: Path, content: str, reason: str
) -> None:
    file = tmp_path / "template.yaml"
    file.write_text(f"kind: Pod\n{content}\n")
    with pytest.raises(ConfigError, match=f"podTemplateFile={file}: {reason}"):
        node_rules({TEMPLATE: str(file)}, GPU)


def test_a_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: .*No such file"):
        executor_template({TEMPLATE: str(tmp_path / "absent.yaml")}, GPU)


def test_rules_come_from_template_and_properties(tmp_path: Path) -> None:
    tolerations = [{"key": "team", "value": "a", "effect": "NoSchedule"}, {"operator": "Exists"}]
    properties = user_template(
        tmp_path, nodeSelector={"pool": "cpu", "disk": "ssd"}, tolerations=tolerations
    )
    properties["spark.kubernetes.node.selector.pool"] = "any"
    properties["spark.kubernetes.executor.node.selector.pool"] = "gpu"
    properties["spark.kubernetes.node.selector.topology.kubernetes.io/zone"] = "z"
    properties["spark.kubernetes.driver.node.selector.only"] = "driver"
    rules = node_rules(properties, GPU)
    assert rules.selector == {"pool": "gpu", "disk": "ssd", "topology.kubernetes.io/zone": "z"}
    assert rules.tolerations == (
        Toleration(GPU, "Exists"),
        Toleration("team", "Equal", "a", "NoSchedule"),
        Toleration("", "Exists"),
    )


def test_resources_as_spark_names_them() -> None:
    assert spark_resource(GPU) == ("nvidia.com", "gpu")
    assert spark_resource("nvidia.com/mig-1g.10gb") == ("nvidia.com", "mig-1g.10gb")


def addresses(tmp_path: Path, resource: str, smi: str, **environ: str) -> Any:
    script = tmp_path / "discover"
    (text,) = executor_template({}, resource)["metadata"]["annotations"].values()
    script.write_text(text)
    program = tmp_path / "smi"
    program.write_text(f"#!/bin/sh\n{smi}\n")
    program.chmod(0o755)
    result = subprocess.run(
        ["/bin/sh", str(script)],
        env={"PATH": "/usr/bin:/bin", "HOPSGPU_NVIDIA_SMI": str(program), **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr == ""
    return json.loads(result.stdout)


def test_the_script_lists_the_gpus_of_its_container(tmp_path: Path) -> None:
    assert addresses(tmp_path, GPU, "printf 'GPU-1\\nGPU-2\\n'") == {
        "name": "gpu",
        "addresses": ["GPU-1", "GPU-2"],
    }


def test_without_nvidia_smi_the_script_lists_the_variable(tmp_path: Path) -> None:
    by_variable = addresses(
        tmp_path, "nvidia.com/mig-1g.5gb", "exit 9", NVIDIA_VISIBLE_DEVICES="0,GPU-a"
    )
    assert by_variable == {"name": "mig-1g.5gb", "addresses": ["0", "GPU-a"]}
    assert addresses(tmp_path, GPU, "exit 0", NVIDIA_VISIBLE_DEVICES="1")["addresses"] == ["1"]
    assert addresses(tmp_path, GPU, "exit 9")["addresses"] == []


def test_an_example_of_an_executors_pod() -> None:
    template = {
        "metadata": {"name": "mine", "labels": {"a": "b"}},
        "spec": {"containers": [{"name": "sidecar"}, {"name": "spark-kubernetes-executor"}]},
    }
    requests = {"cpu": "2", "memory": "1024Mi", GPU: "1"}
    account = "spark.kubernetes.authenticate.driver.serviceAccountName"
    properties = {account: "jobs", "spark.kubernetes.executor.limit.cores": "4"}
    pod = example_pod(template, properties, "train:1", requests)
    assert pod["metadata"] == {"generateName": "hopsgpu-example-", "labels": {"a": "b"}}
    assert pod["spec"]["serviceAccountName"] == "jobs"
    assert pod["spec"]["containers"][0] == {"name": "sidecar"}
    container = pod["spec"]["containers"][1]
    assert container["image"] == "train:1"
    limits = {"cpu": "4", "memory": "1024Mi", GPU: "1"}
    assert container["resources"] == {"requests": requests, "limits": limits}
    of_executor = {**properties, account.replace("driver", "executor"): "other"}
    pod = example_pod(template, of_executor, "train:1", requests)
    assert pod["spec"]["serviceAccountName"] == "other"
    # The template is another gang's, too.
    assert template["spec"]["containers"] == [
        {"name": "sidecar"},
        {"name": "spark-kubernetes-executor"},
    ]
