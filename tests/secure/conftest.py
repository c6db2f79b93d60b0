"""A Kerberized cluster, on which each test is alice or bob by tickets of its own.

`make secure` runs these, and the behaviours of tests/matrix on a cluster like it with a keytab.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hopsgpu import devcluster
from hopsgpu.cluster_managers.yarn.resource_manager import ResourceManager, web_addresses
from hopsgpu.devcluster.layout import ClusterLayout
from hopsgpu.devcluster.realm import Realm
from hopsgpu.storage.hadoop_conf import HadoopConf

Env = dict[str, str]


@pytest.fixture(scope="session")
def cluster_dir(tmp_path_factory: pytest.TempPathFactory, own_tmpdir: Path) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("cluster")
    conf = {
        "yarn-site": {"yarn.nodemanager.admin-env.TMPDIR": str(own_tmpdir)},
        # bob is also a gateway that may act for alice, where he says so.
        "core-site": {"hadoop.proxyuser.bob.hosts": "*", "hadoop.proxyuser.bob.users": "alice"},
    }
    try:
        devcluster.up(directory, kerberos=True, conf=conf, keep_classes=True)
        yield directory
    finally:
        devcluster.down(directory)


@pytest.fixture(scope="session")
def realm(cluster_dir: Path) -> Realm:
    return Realm(ClusterLayout.at(cluster_dir).realm)


@pytest.fixture(scope="session")
def signed_in(
    cluster_env: Env, realm: Realm, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Env]:
    """Gives an environment with a user's ticket, got as `kinit` gets it."""

    def sign_in(user: str, *options: str) -> Env:
        cache = tmp_path_factory.mktemp("tickets") / user
        env = {**cluster_env, "KRB5CCNAME": f"FILE:{cache}"}
        keytab = str(realm.keytab(user))
        subprocess.run(["kinit", *options, "-k", "-t", keytab, user], env=env, check=True)
        return env

    return sign_in


@pytest.fixture(scope="session")
def alice(signed_in: Callable[..., Env]) -> Env:
    return signed_in("alice")


@pytest.fixture(scope="session")
def bob(signed_in: Callable[..., Env]) -> Env:
    return signed_in("bob")


@pytest.fixture(scope="session")
def manager(alice: Env) -> Iterator[ResourceManager]:
    """As alice, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRB5CCNAME", alice["KRB5CCNAME"])
        yield ResourceManager(web_addresses(HadoopConf.load(alice).get))
