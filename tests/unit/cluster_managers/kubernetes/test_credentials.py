"""Credentials of a kubeconfig or a pod: which server gets them, and that no text has them."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes.config import incluster_config

from hopsgpu.cluster_managers.kubernetes import credentials
from hopsgpu.cluster_managers.kubernetes.api_client import ApiClient
from hopsgpu.cluster_managers.kubernetes.credentials import (
    ApiAccess,
    api_address,
    is_in_pod,
    load_access,
)
from hopsgpu.errors import ConfigError
from tests.unit.cluster_managers.kubernetes.api_server import TOKEN, access_of
from tests.unit.cluster_managers.kubernetes.kubeconfigs import write_kubeconfig

URL = "https://10.0.0.1:6443"


def load(file: Path, master: str = f"k8s://{URL}", **properties: str) -> ApiAccess:
    named = {f"spark.kubernetes.{name}": value for name, value in properties.items()}
    return load_access({"spark.master": master, **named}, {"KUBECONFIG": str(file)})


def token_of(access: ApiAccess) -> str:
    (setting,) = access.configuration.auth_settings().values()
    return str(setting["value"])


@pytest.mark.parametrize(
    ("master", "address"),
    [
        ("k8s://https://h:6443", "https://h:6443"),
        (" k8s://https://h:6443/ ", "https://h:6443"),
        ("k8s://http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("k8s://h:6443", "https://h:6443"),
        ("k8s://https://[::1]:6443", "https://[::1]:6443"),
        ("k8s://https://h/k8s/clusters/c-1/", "https://h/k8s/clusters/c-1"),
    ],
)
def test_the_address_of_a_master(master: str, address: str) -> None:
    assert api_address(master) == address


@pytest.mark.parametrize(
    "master",
    [
        "k8s://",
        "k8s://ftp://h",
        "k8s://https://",
        "k8s://h:none",
        "k8s://h:99999",
        "k8s://https://[::1",
        "k8s://https://evil\\@h:6443",
        "k8s://https://user@h",
        "k8s://https://h?a",
        "k8s://https://h\n:6443",
    ],
)
def test_a_master_without_an_address_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match="must be k8s://https://HOST:PORT"):
        api_address(master)


def test_the_current_context_counts(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, URL)
    access = load(file)
    assert (access.address, access.namespace, access.origin) == (URL, "team", str(file))
    assert token_of(access) == f"Bearer {TOKEN}"
    assert access.configuration.verify_ssl


def test_namespaces_of_contexts_and_of_the_property(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, URL)
    assert load(file, context="plain").namespace == "default"
    assert load(file, context="plain", namespace="mine").namespace == "mine"
    assert load(file, namespace="mine").namespace == "mine"


def test_another_server_does_not_get_the_credentials(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, URL)
    words = r"the context \(the current one\) of .* is of https://10.0.0.1:6443.*does not send"
    for master in ("k8s://https://10.0.0.1:6444", "k8s://https://10.0.0.2:6443", "k8s://evil"):
        with pytest.raises(ConfigError, match=words):
            load(file, master)
    with pytest.raises(ConfigError, match="does not send"):
        load(file, "k8s://http://10.0.0.1:6443")
    with pytest.raises(ConfigError, match="the context elsewhere of"):
        load(file, context="elsewhere")
    assert load(file, "k8s://https://10.0.0.9:6443", context="elsewhere").address


def test_the_same_server_may_be_written_otherwise(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, "https://Api.Company")
    for master in ("k8s://https://api.company:443", "k8s://API.company", "k8s://api.company/"):
        assert load(file, master).namespace == "team"


def test_a_missing_file_and_an_unknown_context_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'absent'} cannot be used.*KUBECONFIG"):
        load(tmp_path / "absent")
    file = write_kubeconfig(tmp_path, URL)
    with pytest.raises(ConfigError, match=r"\(context absent\) cannot be used.*get-contexts"):
        load(file, context="absent")


def test_without_the_variable_the_file_is_that_of_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".kube").mkdir()
    write_kubeconfig(tmp_path, URL).rename(tmp_path / ".kube" / "config")
    access = load_access({"spark.master": f"k8s://{URL}"}, {})
    assert access.origin == str(tmp_path / ".kube" / "config")


@pytest.mark.parametrize(
    "user", [{"tokenFile": "/absent/token"}, {"client-certificate": "/absent/c", "client-key": "k"}]
)
def test_a_missing_file_of_credentials_is_refused(tmp_path: Path, user: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot be used: .*/absent/"):
        load(write_kubeconfig(tmp_path, URL, user))


def test_a_token_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    file = write_kubeconfig(tmp_path, URL, {"tokenFile": str(tmp_path / "token")})
    assert token_of(load(file)) == f"Bearer {TOKEN}"


def test_a_token_file_may_end_in_a_line_break(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    file = write_kubeconfig(tmp_path, URL, {"tokenFile": str(tmp_path / "token")})
    assert load(file).headers() == {"authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize("token", [f"{TOKEN}\nx", f"{TOKEN}\u20ac", f"{TOKEN} x"])
def test_a_token_that_is_no_header_is_refused_and_not_shown(tmp_path: Path, token: str) -> None:
    file = write_kubeconfig(tmp_path, URL, {"token": token})
    with pytest.raises(ConfigError, match=f"the token of {file} is empty, or has") as caught:
        load(file)
    assert TOKEN not in str(caught.value)


def test_a_token_that_cannot_be_renewed_is_refused_and_not_shown() -> None:
    access = access_of(URL)

    def renew(configuration: Any) -> None:
        raise ValueError(f"not understood: {TOKEN}")

    access.configuration.refresh_api_key_hook = renew
    with pytest.raises(ConfigError, match=r"cannot be renewed: .*\(ValueError\)") as caught:
        access.headers()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "user", [{"name": "u", "token": TOKEN}, {"name": "u", "usr": {"token": TOKEN}}]
)
def test_an_entry_of_another_form_is_refused_without_its_token(
    tmp_path: Path, user: dict[str, Any]
) -> None:
    file = write_kubeconfig(tmp_path, URL)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "users": [user]}))
    with pytest.raises(ConfigError, match="cannot be used: it lacks the key user") as caught:
        load(file)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (f"users: [\ntoken: {TOKEN}", "line 2 is no YAML"),
        (f"a: b: {TOKEN}", "line 1 is no YAML"),
        ("[1]", "another form"),
        (TOKEN, "another form"),
        ("", "another form"),
        ("users: {name: u}\ncontexts: {}\nclusters: {}\n", "the key current-context"),
        ("users: []\ncontexts: []\nclusters: []\n", "the key current-context"),
        ("current-context: a\ncontexts: [{name: a, context: [1]}]\n", "the key cluster"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "config"
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"{file} cannot be used: .*{problem}") as caught:
        load(file)
    assert TOKEN not in "".join(traceback.format_exception(caught.value))


def test_a_token_is_sent_unencrypted_only_to_this_machine(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:8001", "http://localhost:8001", "http://[::1]:8001"):
        assert load(write_kubeconfig(tmp_path, url), f"k8s://{url}").headers()
    url = "http://10.0.0.1:8001"
    with pytest.raises(ConfigError, match="does not send the token of .* unencrypted"):
        load(write_kubeconfig(tmp_path, url), f"k8s://{url}")
    assert load(write_kubeconfig(tmp_path, url, {"a": "b"}), f"k8s://{url}").headers() == {}


def test_no_text_has_the_token(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, URL)
    access = load(file)
    assert TOKEN not in repr(access) + str(access) + repr(ApiClient(access))
    for master, context in ((f"k8s://{URL}", "absent"), ("k8s://https://evil", "here")):
        with pytest.raises(ConfigError) as caught:
            load(file, master, context=context)
        assert TOKEN not in str(caught.value)


def test_a_proxy_of_the_environment_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    assert load(write_kubeconfig(tmp_path, URL)).configuration.proxy is None


def test_the_file_of_the_user_is_not_changed(tmp_path: Path) -> None:
    file = write_kubeconfig(tmp_path, URL)
    before = file.read_bytes()
    load(file)
    assert file.read_bytes() == before


def cluster_of(url: str, authority: Path | None) -> str:
    access = access_of(url)
    access.configuration.ssl_ca_cert = authority and str(authority)
    return access.cluster


def test_a_cluster_has_one_name_inside_and_outside(tmp_path: Path) -> None:
    inside, outside, other = (tmp_path / name for name in ("inside", "outside", "other"))
    inside.write_bytes(b"-----BEGIN-----\nAAAA\nBBBB\n-----END-----\n")
    outside.write_bytes(inside.read_bytes().replace(b"\n", b"\r\n"))
    other.write_bytes(b"-----BEGIN-----\nCCCC\n-----END-----\n")
    name = cluster_of("https://kubernetes.default.svc", inside)
    assert name == cluster_of("https://api.company:6443", outside)
    assert name != cluster_of("https://kubernetes.default.svc", other)
    assert name.startswith("k8s-") and "company" not in name


def test_without_a_private_authority_the_address_names_a_cluster(tmp_path: Path) -> None:
    names = {cluster_of(f"https://{host}", None) for host in ("a", "b", "a")}
    assert len(names) == 2
    assert cluster_of("https://a", tmp_path / "absent") in names


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the service account of a pod, in which this process seems to run."""
    directory = tmp_path / "account"
    directory.mkdir()
    for name, content in (("token", TOKEN), ("ca.crt", "certificate"), ("namespace", "jobs\n")):
        (directory / name).write_text(content)
    monkeypatch.setattr(credentials, "_ACCOUNT", directory)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(directory / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(directory / "ca.crt"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    return directory


def test_a_pod_has_the_credentials_of_its_service_account(account: Path) -> None:
    master = "k8s://https://kubernetes.default.svc"
    access = load_access({"spark.master": master}, {})
    assert is_in_pod()
    assert (access.address, access.namespace) == ("https://kubernetes.default.svc", "jobs")
    assert access.origin == "the pod's service account"
    assert token_of(access).lower() == f"bearer {TOKEN}"
    assert access.configuration.ssl_ca_cert == str(account / "ca.crt")
    assert TOKEN not in repr(access)
    mine = load_access({"spark.master": master, "spark.kubernetes.namespace": "mine"}, {})
    assert mine.namespace == "mine"
    (account / "namespace").unlink()
    assert load_access({"spark.master": master}, {}).namespace == "default"


@pytest.mark.parametrize(
    "server",
    [
        "https://kubernetes.default.svc:443",
        "https://kubernetes.default.svc.cluster.local",
        "https://Kubernetes.Default",
        "https://10.0.0.1",
        "https://10.0.0.1:443/",
    ],
)
def test_names_of_a_pods_own_server(account: Path, server: str) -> None:
    assert load_access({"spark.master": f"k8s://{server}"}, {}).namespace == "jobs"


def test_a_driver_that_spark_submit_has_put_into_a_pod_asks_the_pods_server(account: Path) -> None:
    outside = {"spark.master": "k8s://https://api:6443", "spark.kubernetes.submitInDriver": "true"}
    access = load_access(outside, {})
    assert access.address == "https://kubernetes.default.svc"
    named = {**outside, "spark.kubernetes.driver.master": "https://10.0.0.1:443"}
    assert load_access(named, {}).address == "https://10.0.0.1:443"
    with pytest.raises(ConfigError, match="the API server of this pod is"):
        load_access({**outside, "spark.kubernetes.driver.master": "https://evil"}, {})


@pytest.mark.parametrize(
    "server",
    [
        "https://evil",
        "https://kubernetes.default.svc.evil",
        "https://kubernetes.default.svc:6443",
        "https://10.0.0.1:6443",
        "http://10.0.0.1:443",
        "http://kubernetes.default.svc:443",
    ],
)
def test_another_server_does_not_get_the_token_of_a_pod(account: Path, server: str) -> None:
    words = f"names {server}, but the API server of this pod is https://10.0.0.1:443: .*KUBECONFIG"
    with pytest.raises(ConfigError, match=words):
        load_access({"spark.master": f"k8s://{server}"}, {})


def test_a_pods_server_may_have_an_ipv6_address(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    assert load_access({"spark.master": "k8s://https://[fd00::1]:443"}, {}).namespace == "jobs"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ca.crt", None, "Service certification file does not exist"),
        ("ca.crt", b"", "Cert file exists but empty"),
        ("token", b"", "Token file exists but empty"),
        ("token", b"\xff", "another form"),
        ("namespace", b"\xff", "another form"),
    ],
)
def test_a_service_account_without_its_files_is_refused(
    account: Path, name: str, content: bytes | None, problem: str
) -> None:
    (account / name).unlink()
    if content is not None:
        (account / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"service account cannot be used: .*{problem}"):
        load_access({"spark.master": "k8s://https://kubernetes.default.svc"}, {})


def test_a_kubeconfig_counts_before_the_service_account(account: Path, tmp_path: Path) -> None:
    assert load(write_kubeconfig(tmp_path, URL)).namespace == "team"
    properties = {"spark.master": "k8s://https://kubernetes.default.svc"}
    assert load_access(properties, {"KUBECONFIG": ""}).namespace == "jobs"


def test_without_token_or_variable_a_process_is_in_no_pod(
    account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (account / "token").unlink()
    assert not is_in_pod()
    (account / "token").write_text(TOKEN)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert not is_in_pod()
