"""Hadoop's configuration files, read as Hadoop's own Configuration reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hopsgpu.cluster_managers.yarn.resource_manager import web_addresses
from hopsgpu.errors import ConfigError
from hopsgpu.storage.hadoop_conf import HadoopConf


def site(directory: Path, text: str, name: str = "yarn-site.xml") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / name).write_text(
        f'<?xml version="1.0"?>\n<configuration>{text}</configuration>', encoding="utf-8"
    )
    return directory


def prop(name: str, value: str, more: str = "") -> str:
    return f"<property><name>{name}</name><value>{value}</value>{more}</property>"


def loaded(directory: Path, **environ: str) -> HadoopConf:
    return HadoopConf.load({"HADOOP_CONF_DIR": str(directory), **environ})


def test_the_addresses_of_a_cluster_with_two_resource_managers(tmp_path: Path) -> None:
    rm = "yarn.resourcemanager"
    site(
        tmp_path,
        prop(f"{rm}.ha.enabled", "true")
        + prop(f"{rm}.ha.rm-ids", "a,b")
        + prop(f"{rm}.hostname.a", "one")
        + prop(f"{rm}.webapp.address.a", f"${{{rm}.hostname.a}}:9088")
        + prop(f"{rm}.hostname.b", "\n   two.example.org\n  "),
    )
    addresses = web_addresses(loaded(tmp_path).get)
    assert addresses == ("http://one:9088", "http://two.example.org:8088")


def test_later_files_win_except_over_final_values(tmp_path: Path) -> None:
    last = "<final>true</final>"
    site(tmp_path, prop("a", "core") + prop("b", "core", last) + prop("c", "core"), "core-site.xml")
    site(tmp_path, prop("a", "yarn") + prop("b", "yarn") + prop("d", "1") + prop("d", "2"))
    conf = loaded(tmp_path)
    assert [conf.get(name) for name in ("a", "b", "c", "d")] == ["yarn", "core", "core", "2"]
    assert conf.get("e") is None


def test_both_forms_of_a_property(tmp_path: Path) -> None:
    site(
        tmp_path,
        '<property name="short" value="1"/><property><name>empty</name><value/></property>'
        "<property><name>without</name><description>no value</description></property>"
        "<!-- a comment --><configuration>" + prop("deep", "2") + "</configuration>",
    )
    conf = loaded(tmp_path)
    assert [conf.get(name) for name in ("short", "empty", "without", "deep")] == [
        "1",
        None,
        None,
        "2",
    ]


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        ("${host}:8088", "rm.example.org:8088"),
        ("${a}${a}", "rm.example.org!rm.example.org!"),
        ("${nobody.knows}:1", "${nobody.knows}:1"),
        ("${env.HOME_OF}/x", "/opt/x"),
        ("${env.UNSET}/x", "${env.UNSET}/x"),
        ("${env.UNSET-/usr}/x", "/usr/x"),
        ("${env.EMPTY-/usr}/x", "/x"),
        ("${env.EMPTY:-/usr}/x", "/usr/x"),
        ("${env.HOME_OF:-/usr}/x", "/opt/x"),
        ("$host ${not a name} {host}", "$host ${not a name} {host}"),
    ],
)
def test_variables(tmp_path: Path, value: str, filled: str) -> None:
    site(tmp_path, prop("host", "rm.example.org") + prop("a", "${host}!") + prop("value", value))
    assert loaded(tmp_path, HOME_OF="/opt", EMPTY="").get("value") == filled


def test_circular_variables_end(tmp_path: Path) -> None:
    site(tmp_path, prop("a", "${b}") + prop("b", "${a}"))
    assert loaded(tmp_path).get("a") in ("${a}", "${b}")


def test_included_values_are_in_the_place_of_the_include(tmp_path: Path) -> None:
    include = '<xi:include xmlns:xi="http://www.w3.org/2001/XInclude" href="{}">{}</xi:include>'
    site(tmp_path / "more", prop("a", "included") + prop("b", "included"), "extra.xml")
    fallback = f"<xi:fallback>{prop('c', 'fallback')}</xi:fallback>"
    site(
        tmp_path,
        prop("a", "before")
        + include.format("more/extra.xml", "")
        + prop("b", "after")
        + include.format("nowhere.xml", fallback),
    )
    conf = loaded(tmp_path)
    assert [conf.get(name) for name in "abc"] == ["included", "after", "fallback"]


def test_include_is_a_url_or_on_the_class_path(tmp_path: Path) -> None:
    below = site(tmp_path / "else where", prop("a", "${b}") + '<include href="top.xml"/>', "a.xml")
    site(tmp_path, prop("b", "class path"), "top.xml")
    for href in ((below / "a.xml").as_uri(), str(below / "a.xml")):
        site(tmp_path, f'<include href="{href}"/>')
        assert loaded(tmp_path).get("a") == "class path"


def test_values_of_an_hdfs_client(tmp_path: Path) -> None:
    site(tmp_path, prop("domain", "example.org") + prop("c", "core"), "core-site.xml")
    site(tmp_path / "more", prop("nn", "one.${domain}:8020"), "ha.xml")
    site(tmp_path, '<include href="more/ha.xml"/>' + prop("c", "hdfs"), "hdfs-site.xml")
    conf = HadoopConf.load_hdfs({"HADOOP_CONF_DIR": str(tmp_path)})
    assert conf.all_values() == {"domain": "example.org", "c": "hdfs", "nn": "one.example.org:8020"}
    assert HadoopConf.load_hdfs({}).all_values() == {}


@pytest.mark.parametrize("href", ["yarn-site.xml", "nowhere.xml"])
def test_invalid_include_is_refused(tmp_path: Path, href: str) -> None:
    site(tmp_path, f'<include href="{href}"/>')
    with pytest.raises(ConfigError, match=href):
        loaded(tmp_path)


def test_the_first_directory_that_has_a_file(tmp_path: Path) -> None:
    one, two = site(tmp_path / "1", prop("a", "1"), "core-site.xml"), site(tmp_path / "2", "")
    site(two, prop("a", "2") + prop("b", "2"), "core-site.xml")
    conf = HadoopConf.load({"HADOOP_CONF_DIR": str(one), "YARN_CONF_DIR": str(two)})
    assert (conf.get("a"), conf.get("b")) == ("1", None)
    assert HadoopConf.load({"HADOOP_CONF_DIR": f"{one}:{two}"}).get("a") == "1"
    assert HadoopConf.load({"YARN_CONF_DIR": str(two)}).get("a") == "2"


def test_missing_configuration_is_named(tmp_path: Path) -> None:
    for environ in ({}, {"HADOOP_CONF_DIR": ""}):
        with pytest.raises(ConfigError, match="HADOOP_CONF_DIR"):
            HadoopConf.load(environ)
    with pytest.raises(ConfigError, match=f"yarn-site.xml .*{tmp_path}"):
        loaded(tmp_path)


def test_file_that_is_no_xml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "yarn-site.xml").write_text("<configuration>\n<property></configuration>")
    with pytest.raises(ConfigError, match=r"yarn-site\.xml: .*line 2"):
        loaded(tmp_path)
