"""KServe's storage initialiser downloads what an export names, from HDFS, plain or Kerberized.

`make serving` runs this; the initialiser's packages have an environment of their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from hopsgpu.artifacts.models import ModelStore
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.realm import REALM, Realm
from hopsgpu.storage.lake import LakePath
from tests.bounds import HANG_SECONDS
from tests.served_models import Published, publish
from tests.serving.test_servers import environment

# What the initialiser's container runs.
DOWNLOAD = """
import sys
from kserve_storage import Storage
Storage.download(*sys.argv[1:])
"""
# A server of KServe's gets one file; an own predictor the directory, here with others in it.
URI_OF = {"pickle": "classifier.joblib", "saved_model": ""}


@pytest.fixture(scope="session")
def namenode(cluster_env: dict[str, str]) -> str:
    """The address of WebHDFS."""
    site = ElementTree.parse(Path(cluster_env["HADOOP_CONF_DIR"]) / "hdfs-site.xml")
    properties = {p.findtext("name"): p.findtext("value") for p in site.iter("property")}
    return f"http://{properties['dfs.namenode.http-address']}"


@pytest.fixture
def keytab(
    kerberos: bool,
    cluster_dir: Path,
    cluster_env: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path | None:
    """Alice's, who has a ticket in this process; None without Kerberos."""
    if not kerberos:
        return None
    file = Realm(ClusterLayout.at(cluster_dir).realm).keytab("alice")
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/tickets")
    subprocess.run(["kinit", "-k", "-t", str(file), "alice"], check=True)
    return file


def mount(exported: Path, directory: Path) -> None:
    """Write the secret that kustomize makes, as a container sees it."""
    (generator,) = yaml.safe_load((exported / "kustomization.yaml").read_text())["secretGenerator"]
    directory.mkdir()
    for literal in generator["literals"]:
        name, _, value = literal.partition("=")
        (directory / name).write_text(value)
    for name in generator.get("files", ()):
        shutil.copy(exported / name, directory / name)


def storage_uri(exported: Path) -> str:
    service = yaml.safe_load((exported / "inference-service.yaml").read_text())
    predictor = service["spec"]["predictor"]
    if "model" in predictor:
        return str(predictor["model"]["storageUri"])
    (variable,) = predictor["containers"][0]["env"]
    assert variable["name"] == "STORAGE_URI"
    return str(variable["value"])


def files_of(published: Published, below: str) -> dict[str, bytes]:
    """The version's files, or the one of them, by name."""
    known = published.version.manifest["files"]
    files = LakePath(published.version.url)
    return {name: (files / name).read() for name in known if below in ("", name)}


@pytest.mark.parametrize("kind", sorted(URI_OF))
def test_it_downloads_what_an_export_names(
    hdfs_url: str, namenode: str, keytab: Path | None, tmp_path: Path, kind: str
) -> None:
    user = "root" if keytab is None else "alice"
    store = ModelStore(f"{hdfs_url}/user/{user}/serving/models")
    one = publish(store, kind, tmp_path)
    exported, secret, got = (tmp_path / name for name in ("exported", "secret", "got"))
    principal = None if keytab is None else f"alice@{REALM}"
    one.version.export(
        "kserve", out=exported, namenode=namenode, principal=principal, trust=kind == "pickle"
    )
    if keytab is not None:
        shutil.copy(keytab, exported / "KERBEROS_KEYTAB")
    mount(exported, secret)
    got.mkdir()
    # Neither the test's tickets nor those that another cluster's tests have left.
    env = {**os.environ, "KRB5CCNAME": f"FILE:{tmp_path}/tickets-of-kserve"}
    python = environment("serving") / "bin" / "python"
    done = subprocess.run(
        [str(python), "-c", DOWNLOAD, storage_uri(exported), str(got)],
        env={**env, "HDFS_SECRET_DIR": str(secret)},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    there = {str(p.relative_to(got)): p.read_bytes() for p in got.rglob("*") if p.is_file()}
    there.pop("manifest.json", None)
    assert there == files_of(one, URI_OF[kind])
