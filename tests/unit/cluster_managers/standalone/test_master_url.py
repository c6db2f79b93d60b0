"""URLs of masters and of their web interfaces."""

from __future__ import annotations

import pytest

from hopsgpu.cluster_managers.standalone.master_url import (
    cluster_of,
    is_standalone,
    master_web_addresses,
    masters_of,
)
from hopsgpu.errors import ConfigError

TWO = "spark://h1:7077,h2:7077"


def test_a_standalone_master_is_recognised() -> None:
    assert is_standalone(" spark://h1:7077") and is_standalone(TWO)
    assert not any(map(is_standalone, (None, "", "yarn", "local[2]", "k8s://https://h")))


@pytest.mark.parametrize(
    ("url", "pairs"),
    [
        ("spark://h1:7077", (("h1", 7077),)),
        (" spark://h1:7077, h2.example.com:7078 ", (("h1", 7077), ("h2.example.com", 7078))),
        ("spark://[::1]:7077", (("[::1]", 7077),)),
    ],
)
def test_masters(url: str, pairs: tuple[tuple[str, int], ...]) -> None:
    assert masters_of(url) == pairs


@pytest.mark.parametrize(
    "url",
    [
        "h1:7077",
        "spark://",
        "spark://h1",
        "spark://h1:0",
        "spark://h1:70777",
        "spark://h1:7077,",
        "spark://h1:7077/x",
        "spark://a@h1:7077",
        "spark://h 1:7077",
        "spark://" + ",".join(f"h{n}:7077" for n in range(17)),
        f"spark://{'h' * 300}:7077",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"must be the URL of at most 16 .*spark://HOST:PORT"):
        masters_of(url)


def test_a_cluster_has_one_name_whatever_the_order_of_its_masters_is() -> None:
    assert cluster_of(TWO) == cluster_of("spark://h2:7077,h1:7077") == "spark-h1-7077-h2-7077"
    assert cluster_of("spark://[::1]:7077") == "spark--1--7077"


@pytest.mark.parametrize(
    ("properties", "environ", "addresses"),
    [
        ({}, {}, ("http://h1:8080", "http://h2:8080")),
        ({}, {"SPARK_MASTER_WEBUI_PORT": "81"}, ("http://h1:81", "http://h2:81")),
        (
            {"spark.master.ui.port": "82"},
            {"SPARK_MASTER_WEBUI_PORT": "81"},
            ("http://h1:82", "http://h2:82"),
        ),
        ({}, {"HOPSGPU_MASTER_UI": "https://p:8443/spark/"}, ("https://p:8443/spark",)),
        (
            {"spark.hopsgpu.master.ui": "http://a:1, http://b:2,http://a:1"},
            {"HOPSGPU_MASTER_UI": "http://c:3"},
            ("http://a:1", "http://b:2"),
        ),
    ],
)
def test_web_addresses(
    properties: dict[str, str], environ: dict[str, str], addresses: tuple[str, ...]
) -> None:
    assert master_web_addresses(TWO, properties, environ) == addresses


def test_masters_of_one_host_have_one_web_address() -> None:
    assert master_web_addresses("spark://h:1,h:2", {}, {}) == ("http://h:8080",)


@pytest.mark.parametrize(
    "url",
    [
        "h1:8080",
        "ftp://h1:8080",
        "http://h1",
        "http://h1:x",
        "http://u:p@h1:8080",
        "http://h1:8080/?a",
        "http://h1:8080/a b",
        "http://h1:8080,",
        "http://[::1:8080",
    ],
)
def test_other_web_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"HOPSGPU_MASTER_UI=.*http://HOST:8080"):
        master_web_addresses(TWO, {}, {"HOPSGPU_MASTER_UI": url})


def test_ports_and_numbers_of_addresses_are_checked() -> None:
    for port in ("0", "x", "70000", "²"):
        with pytest.raises(ConfigError, match=r"spark\.master\.ui\.port="):
            master_web_addresses(TWO, {"spark.master.ui.port": port}, {})
    many = ",".join(f"http://h{n}:8080" for n in range(17))
    with pytest.raises(ConfigError, match="17 URLs: at most 16"):
        master_web_addresses(TWO, {"spark.hopsgpu.master.ui": many}, {})
