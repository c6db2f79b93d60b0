"""Lists in answers of Hadoop 3.3.6 and 3.5.0, as their daemons wrote them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hopsgpu.cluster_managers.yarn.amounts import DEFAULT_GPU_RESOURCE as GPU
from hopsgpu.cluster_managers.yarn.answer_lists import FieldTrail, join_repeated, with_lists
from hopsgpu.cluster_managers.yarn.rest_answers import (
    apps_of,
    containers_of,
    nodes_of,
    unreported_apps,
)


def read(text: str) -> Any:
    return with_lists(json.loads(text, object_pairs_hook=join_repeated))


APP = (
    '{"id":"application_1_0001","user":"ada","name":"fit","queue":"default","state":"RUNNING",'
    '"startedTime":2000,"amContainerLogs":'
    '"http://node1:8042/node/containerlogs/container_1_0001_01_000001/ada",'
    '"resourceSecondsMap":%s}'
)
SEVERAL = (
    '{"entry":{"key":"memory-mb","value":"119470"},"entry":{"key":"yarn.io/gpu","value":"17"},'
    '"entry":{"key":"vcores","value":"133"}}'
)
ONE = '{"entry":{"key":"yarn.io/gpu","value":"17"}}'
LISTED = '{"entry":[{"key":"memory-mb","value":"9"},{"key":"yarn.io/gpu","value":"17"}]}'


@pytest.mark.parametrize("seconds", [SEVERAL, ONE, LISTED])
def test_gpu_seconds_of_an_app_that_reports_no_gpus(seconds: str) -> None:
    answer = read('{"apps":{"app":[%s]}}' % (APP % seconds))  # noqa: UP031 - braces
    unreported = unreported_apps(answer, "other", 5, GPU)
    assert unreported == {"application_1_0001": "appattempt_1_0001_000001"}


@pytest.mark.parametrize("apps", ["{}", "null", '""', '{"app":[]}'])
def test_no_apps(apps: str) -> None:
    assert apps_of(read(f'{{"apps":{apps}}}'), frozenset({""}), {}, GPU) == ()


def test_one_app_alone_and_its_queue_and_user_are_values() -> None:
    answer = read('{"apps":{"app":%s}}' % (APP % "{}"))  # noqa: UP031 - braces
    (app,) = apps_of(answer, frozenset({""}), {}, GPU)
    assert (app.id, app.queue, app.user) == ("application_1_0001", "default", "ada")


CONTAINER = (
    '{"containerId":"container_1_0001_01_00000%d","nodeId":"node1:45454","startedTime":"3000",'
    '"allocatedResources":{"entry":{"key":"memory-mb","value":"4096"},'
    '"entry":{"key":"yarn.io/gpu","value":"1"},"entry":{"key":"vcores","value":"5"}}}'
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("{}", []),
        (f'{{"container":{CONTAINER % 1}}}', [1]),
        (f'{{"container":[{CONTAINER % 1},{CONTAINER % 2}]}}', [1, 2]),
        (f'{{"container":{CONTAINER % 1},"container":{CONTAINER % 2}}}', [1, 2]),
    ],
)
def test_containers(text: str, numbers: list[int]) -> None:
    found = containers_of(read(text), GPU)
    assert [container.id for container in found] == [
        f"container_1_0001_01_00000{number}" for number in numbers
    ]
    assert all(container.size.gpus == 1 for container in found)


def test_one_node_with_one_label_and_its_resources() -> None:
    (node,) = nodes_of(
        read(
            '{"nodes":{"node":{"id":"node1:1","nodeHostName":"node1","state":"RUNNING",'
            '"nodeLabels":"gpu","totalResource":{"memory":10240,"vCores":6,'
            '"resourceInformations":{"resourceInformation":{"name":"yarn.io/gpu","value":1}}}}}}'
        ),
        GPU,
    )
    assert node.partition == "gpu" and node.total.gpus == 1


def test_lists_stay_as_they_are() -> None:
    answer = {"queues": {"queue": [{"queueName": "a", "users": {"user": []}}]}, "queue": "a"}
    assert with_lists(answer) == answer


def test_a_field_that_is_not_understood_is_named_with_its_place() -> None:
    trail = FieldTrail()
    answer = {"apps": {"app": [{"id": "a"}, {"id": "b", "startedTime": "soon"}, {"name": "c"}]}}
    (_, second, third) = with_lists(answer, "http://rm/apps", trail)["apps"]["app"]
    with pytest.raises(KeyError) as missing:
        third["id"]
    assert trail.explain(missing.value) == "the field apps.app[2].id is missing"
    with pytest.raises(ValueError, match="soon") as odd:
        int(second.get("startedTime"))
    assert trail.explain(odd.value) == (
        "the field apps.app[1].startedTime has an unexpected form (ValueError: invalid literal for"
        " int() with base 10: 'soon')"
    )
    assert trail.url == "http://rm/apps"
