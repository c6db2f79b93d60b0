"""High availability: a second NameNode or ResourceManager takes over when the first one dies.

ZooKeeper elects the active daemons, as on real clusters. The ResourceManagers take part in the
election themselves; each NameNode has a failover controller (ZKFC). The NameNodes share their edits
in a directory, where real clusters have JournalNodes.

Sources: the Hadoop documentation, "HDFS High Availability Using the Quorum Journal Manager" and
"... With NFS", "ResourceManager High Availability"; ZooKeeper's "Administrator's Guide".
"""

from __future__ import annotations

from collections.abc import Mapping

from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.daemons import MARKER, marker
from hopsgpu.devcluster.layout import (
    FAILOVER_CONTROLLERS,
    MASTER,
    NAME_SERVICE,
    NAMENODES,
    RESOURCEMANAGERS,
    ZOOKEEPER,
    ClusterLayout,
)

Ports = Mapping[str, int]
# If a daemon is silent for this time, ZooKeeper elects another one. A garbage collection, or an
# overloaded machine, must not cause an election.
_SESSION_MS = "6000"
NAMENODE_IDS = dict(zip(NAMENODES, ("nn1", "nn2"), strict=True))
RESOURCEMANAGER_IDS = dict(zip(RESOURCEMANAGERS, ("rm1", "rm2"), strict=True))


def arguments_of(daemon: str, spec: ClusterSpec) -> tuple[str, ...]:
    """Return the arguments that give a daemon its id among the two.

    By default, Hadoop distinguishes the daemons by their addresses, which are equal here.
    """
    namenodes = dict(zip(FAILOVER_CONTROLLERS, NAMENODES, strict=True))
    if spec.namenode_ha and (name := namenodes.get(daemon, daemon)) in NAMENODE_IDS:
        return ("-D", f"dfs.ha.namenode.id={NAMENODE_IDS[name]}")
    if spec.resourcemanager_ha and daemon in RESOURCEMANAGER_IDS:
        return ("-D", f"yarn.resourcemanager.ha.id={RESOURCEMANAGER_IDS[daemon]}")
    return ()


def core_site(ports: Ports) -> Properties:
    return {
        "fs.defaultFS": f"hdfs://{NAME_SERVICE}",
        "ha.zookeeper.quorum": quorum(ports),
        "ha.zookeeper.session-timeout.ms": _SESSION_MS,
    }


def hdfs_site(layout: ClusterLayout, spec: ClusterSpec, ports: Ports) -> Properties:
    service = NAME_SERVICE
    web = "https-address" if spec.https else "http-address"
    properties = {
        "dfs.nameservices": service,
        f"dfs.ha.namenodes.{service}": ",".join(NAMENODE_IDS.values()),
        f"dfs.client.failover.proxy.provider.{service}": "org.apache.hadoop.hdfs.server.namenode"
        ".ha.ConfiguredFailoverProxyProvider",
        "dfs.ha.automatic-failover.enabled": "true",
        "dfs.ha.fencing.methods": f"shell({layout.fence})",
        "dfs.namenode.shared.edits.dir": f"file://{layout.edits}",
        # The longest delay until the standby NameNode reads the edits of the active one.
        "dfs.ha.log-roll.period": "10s",
        "dfs.ha.tail-edits.period": "1s",
    }
    for daemon, controller in zip(NAMENODES, FAILOVER_CONTROLLERS, strict=True):
        suffix = f"{service}.{NAMENODE_IDS[daemon]}"
        host = spec.namenode_host
        properties |= {
            f"dfs.namenode.rpc-address.{suffix}": f"{host}:{ports[f'{daemon}.rpc']}",
            f"dfs.namenode.{web}.{suffix}": f"{MASTER}:{ports[f'{daemon}.web']}",
            f"dfs.namenode.name.dir.{suffix}": str(layout.name(daemon)),
            f"dfs.ha.zkfc.port.{suffix}": str(ports[f"{controller}.rpc"]),
        }
    return properties


def fence_script(layout: ClusterLayout) -> str:
    """Return the program that kills the formerly active NameNode, if it still runs.

    Nothing else prevents two NameNodes from writing into the directory of edits. Hadoop sets
    target_namenodeid to the NameNode's id.
    """
    daemons = "\n".join(
        f"  {name}) member='{marker(layout.root, daemon)}' ;;"
        for daemon, name in NAMENODE_IDS.items()
    )
    return f"""#!/bin/sh
case "$target_namenodeid" in
{daemons}
  *) exit 1 ;;
esac
for process in /proc/[0-9]*; do
  if tr '\\0' '\\n' < "$process/environ" 2> /dev/null | grep -qxF "{MARKER}=$member"; then
    kill -9 "${{process#/proc/}}"
  fi
done
"""


def yarn_site(spec: ClusterSpec, ports: Ports) -> Properties:
    rm = "yarn.resourcemanager"
    web = "webapp.https.address" if spec.https else "webapp.address"
    uses = {
        "address": "rpc",
        "scheduler.address": "scheduler",
        "resource-tracker.address": "tracker",
        "admin.address": "admin",
        web: "web",
    }
    properties = {
        f"{rm}.ha.enabled": "true",
        f"{rm}.ha.rm-ids": ",".join(RESOURCEMANAGER_IDS.values()),
        f"{rm}.cluster-id": "hopsgpu",
        f"{rm}.zk-address": quorum(ports),
        f"{rm}.zk-timeout-ms": _SESSION_MS,
        # Applications and their containers survive the ResourceManager that started them.
        f"{rm}.recovery.enabled": "true",
        f"{rm}.store.class": "org.apache.hadoop.yarn.server.resourcemanager.recovery"
        ".ZKRMStateStore",
    }
    for daemon, name in RESOURCEMANAGER_IDS.items():
        properties[f"{rm}.hostname.{name}"] = MASTER
        for key, use in uses.items():
            properties[f"{rm}.{key}.{name}"] = f"{MASTER}:{ports[f'{daemon}.{use}']}"
    return properties


def zookeeper_conf(layout: ClusterLayout, ports: Ports) -> Properties:
    """Return zoo.cfg: one server, whose data `down` removes."""
    return {
        "dataDir": str(layout.temporary(ZOOKEEPER) / "data"),
        "clientPort": str(ports[f"{ZOOKEEPER}.rpc"]),
        "clientPortAddress": MASTER,
        "tickTime": "1000",
        # Spark's Masters request 60 s, before which no standby would take over.
        "maxSessionTimeout": _SESSION_MS,
        "admin.enableServer": "false",
    }


def quorum(ports: Ports) -> str:
    """Return the address of ZooKeeper, as clients' settings have it."""
    return f"{MASTER}:{ports[f'{ZOOKEEPER}.rpc']}"
