"""A real Kubernetes in place of YARN: etcd, the control plane, and nodes with simulated GPUs.

Each node has a containerd and a kubelet, in namespaces of their own. Clients act as the user `data`
with the role that docs/kubernetes.md gives to users; the administrator's kubeconfig is apart.

Sources: the Kubernetes documentation of the daemons' options, "Using RBAC Authorization" and
"Device Plugins"; containerd's of its configuration.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hopsgpu.cluster_managers.kubernetes.gpu_resource import (
    DEFAULT_GPU_RESOURCE as GPU_RESOURCE,
)
from hopsgpu.cluster_managers.kubernetes.kind import IMAGE, Kubernetes
from hopsgpu.cluster_managers.kubernetes.manager import KubernetesManager
from hopsgpu.cluster_managers.kubernetes.nodes import PRODUCT
from hopsgpu.cluster_managers.kubernetes.pod_template import TEMPLATE
from hopsgpu.devcluster import admin, kubernetes_node
from hopsgpu.devcluster.config import ClusterSpec, Properties
from hopsgpu.devcluster.daemons import run_logged
from hopsgpu.devcluster.kubernetes_images import PAUSE_IMAGE, SPARK_IMAGE, write_images
from hopsgpu.devcluster.kubernetes_network import ClusterNetwork, network_of, remove_network
from hopsgpu.devcluster.kubernetes_programs import KUBECTL, PAUSE, PLUGIN, PLUGINS_OF_CNI
from hopsgpu.devcluster.layout import API_SERVER, ClusterLayout, node_names
from hopsgpu.devcluster.node_gpus import GpuPlan, PlannedGpu
from hopsgpu.devcluster.site_files import node_size
from hopsgpu.devcluster.state import write
from hopsgpu.errors import HopsGpuError

NAMESPACE, USER = "default", "data"
CONTAINER = "spark-kubernetes-executor"
_CONTEXT = "hopsgpu"
_POD_MEMORY = "100Mi"
# Directories that pods have of their own; they show the machine's others. The image has Spark's
# working directory in /opt.
_OWN: tuple[str, ...]
_OWN = ("bin", "boot", "dev", "etc", "lib", "lib64", "lost+found", "media", "opt", "proc", "run")
_OWN += ("sbin", "sys", "tmp", "var")
_OF_ETC = ("alternatives", "ssl")
_OPENSSL_DAYS = "3650"


def master_url(layout: ClusterLayout) -> str:
    """Return the value of `spark.master` for a cluster."""
    return f"k8s://{_url(network_of(layout.root))}"


def _url(network: ClusterNetwork) -> str:
    return f"https://{network.api_server}:443"


def _home(layout: ClusterLayout) -> Path:
    return layout.root / "kubernetes"


def client_kubeconfig(layout: ClusterLayout) -> Path:
    return _home(layout) / "kubeconfig"


def admin_kubeconfig(layout: ClusterLayout) -> Path:
    return _home(layout) / "admin-kubeconfig"


def authority_file(layout: ClusterLayout) -> Path:
    return _home(layout) / "certificates" / "apiserver.crt"


def client_properties(layout: ClusterLayout, spark: Path) -> Properties:
    """Return the properties that point a client's Spark and hopsgpu at the cluster.

    Args:
        spark: the client's SPARK_HOME, which pods have at the same path.
    """
    return {
        "spark.master": master_url(layout),
        "spark.kubernetes.namespace": NAMESPACE,
        IMAGE: SPARK_IMAGE,
        TEMPLATE: str(_home(layout) / "executor.yaml"),
        "spark.kubernetes.driver.podTemplateFile": str(_home(layout) / "driver.yaml"),
        "spark.kubernetes.driver.master": _url(network_of(layout.root)),
        "spark.kubernetes.authenticate.driver.serviceAccountName": USER,
        "spark.executorEnv.SPARK_HOME": str(spark),
        "spark.kubernetes.driverEnv.SPARK_HOME": str(spark),
        "spark.kubernetes.executor.request.cores": "0.2",
        "spark.kubernetes.driver.request.cores": "0.2",
        "spark.kubernetes.driver.service.ipFamilies": "IPv4",
    }


def write_files(
    layout: ClusterLayout,
    spec: ClusterSpec,
    gpus: GpuPlan,
    programs: Mapping[str, Path],
    java: str,
) -> None:
    """Write the files that the daemons, the nodes and clients read.

    Args:
        java: JAVA_HOME of pods.
    """
    home, network = _home(layout), network_of(layout.root)
    (home / "certificates").mkdir(mode=0o700, parents=True, exist_ok=True)
    tokens = _tokens(home)
    rows = [f"{tokens['admin']},admin,1,system:masters", f"{tokens[USER]},{USER},2,users"]
    write(home / "tokens.csv", "\n".join(rows) + "\n", 0o600)
    for file, user in ((admin_kubeconfig(layout), "admin"), (client_kubeconfig(layout), USER)):
        write(file, yaml.safe_dump(_kubeconfig(layout, network, user, tokens[user])), 0o600)
    archives = write_images(home / "images", programs[PAUSE])
    for number, (node, planned) in enumerate(gpus.nodes.items(), start=1):
        _write_node(layout, spec, network, number, node, planned, programs, archives)
    write(home / "executor.yaml", yaml.safe_dump(_pod_template(java)))
    write(home / "driver.yaml", yaml.safe_dump(_pod_template(java)))


def _tokens(home: Path) -> dict[str, str]:
    """Return the users' tokens, which stay the same over restarts."""
    file = home / "tokens.json"
    if not file.exists():
        tokens = {user: secrets.token_urlsafe(32) for user in ("admin", USER)}
        write(file, json.dumps(tokens), 0o600)
    return dict(json.loads(file.read_text(encoding="ascii")))


def _kubeconfig(
    layout: ClusterLayout, network: ClusterNetwork, user: str, token: str
) -> dict[str, Any]:
    cluster = {"server": _url(network), "certificate-authority": str(authority_file(layout))}
    context = {"cluster": _CONTEXT, "user": user, "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": _CONTEXT, "cluster": cluster}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": _CONTEXT, "context": context}],
        "current-context": _CONTEXT,
    }


def _pod_template(java: str) -> dict[str, Any]:
    """Return a pod that shows this machine's files, for the image that has none."""
    shown = [
        path
        for path in sorted(Path("/").iterdir())
        if path.is_dir() and not path.is_symlink() and path.name not in _OWN
    ]
    shown += [Path("/etc", name) for name in _OF_ETC if Path("/etc", name).is_dir()]
    shown += sorted(Path("/etc").glob("java-*"))
    # As on YARN's nodes, which are this machine: tests and examples exchange files there.
    volumes, mounts = [], []
    for number, path in enumerate([*shown, Path("/tmp")]):
        is_read_only = path != Path("/tmp")
        volumes.append({"name": f"machine-{number}", "hostPath": {"path": str(path)}})
        mounts.append(
            {"name": f"machine-{number}", "mountPath": str(path), "readOnly": is_read_only}
        )
    environ = {"JAVA_HOME": java, "PYTHONDONTWRITEBYTECODE": "1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "containers": [
                {
                    "name": CONTAINER,
                    "env": [{"name": n, "value": v} for n, v in environ.items()],
                    "volumeMounts": mounts,
                }
            ],
            "volumes": volumes,
        },
    }


def _write_node(
    layout: ClusterLayout,
    spec: ClusterSpec,
    network: ClusterNetwork,
    number: int,
    node: str,
    gpus: tuple[PlannedGpu, ...],
    programs: Mapping[str, Path],
    archives: list[Path],
) -> None:
    home = layout.node(node)
    # A path of a Unix socket may have 107 bytes, and containerd's shims have some here.
    state = Path("/run/containerd")
    socket = state / "containerd.sock"
    first, last = network.pods_of(number)
    ranges = {"subnet": network.pods, "rangeStart": first, "rangeEnd": last}
    ranges["gateway"] = network.api_server
    write(
        home / "cni" / "10-pods.conflist",
        json.dumps(
            {
                "cniVersion": "0.4.0",
                "name": "pods",
                "plugins": [
                    {
                        "type": "bridge",
                        "bridge": "pods",
                        "isGateway": False,
                        "ipMasq": False,
                        "ipam": {
                            "type": "host-local",
                            "dataDir": "/var/lib/cni",
                            "ranges": [[ranges]],
                            "routes": [{"dst": "0.0.0.0/0"}],
                        },
                    }
                ],
            }
        ),
    )
    write(home / "containerd.toml", _containerd_conf(home, state, socket))
    memory, cores = node_size(spec.counted_gpus)
    kubelet = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": network.node(number),
        "port": 10250,
        "healthzBindAddress": network.node(number),
        "healthzPort": 10248,
        "readOnlyPort": 0,
        "failSwapOn": False,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": 0,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "featureGates": {"KubeletInUserNamespace": True},
        "resolvConf": "",
        # A node's disk and memory are the machine's, which other programs use.
        "evictionHard": {
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "memory.available": "50Mi",
        },
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # The control plane notices within seconds that a node is gone.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 5,
        "podLogsDir": "/var/log/pods",
    }
    write(home / "kubelet.yaml", yaml.safe_dump(kubelet))
    programs_of_node = home / "bin"
    offer = {
        "resource": spec.gpu_resource,
        "devices": [gpu.uuid for gpu in gpus],
        "mounts": {str(programs_of_node): str(programs_of_node)},
        "environ": {"HOPSGPU_NVIDIA_SMI": str(programs_of_node / "nvidia-smi")},
    }
    write(home / "gpus.json", json.dumps(offer))
    labels = f"{PRODUCT}={gpus[0].name.replace(' ', '-')}" if gpus else ""
    node_spec = kubernetes_node.NodeSpec(
        home=str(home),
        logs=str(layout.logs),
        control_group=f"{network.name}/{node}",
        cores=cores,
        memory_mib=memory,
        containerd=["containerd", "--config", str(home / "containerd.toml")],
        ctr=["ctr", "--address", str(socket), "--namespace", "k8s.io"],
        plugin=[str(programs[PLUGIN]), str(home / "gpus.json")] if gpus else [],
        kubelet=[
            str(programs["kubelet"]),
            *("--config", str(home / "kubelet.yaml")),
            *("--kubeconfig", str(admin_kubeconfig(layout))),
            *("--cert-dir", str(home / "certificates")),
            *("--hostname-override", node),
            *("--node-ip", network.node(number)),
            *(("--node-labels", labels) if labels else ()),
        ],
        socket=str(socket),
        images=[str(archive) for archive in archives],
    )
    write(home / "node.json", node_spec.to_json())


def _containerd_conf(home: Path, state: Path, socket: Path) -> str:
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""version = 2
root = "{home / "containerd"}"
state = "{state}"
oom_score = 0
[grpc]
address = "{socket}"
[{cri}]
sandbox_image = "{PAUSE_IMAGE}"
restrict_oom_score_adj = true
disable_apparmor = true
[{cri}.cni]
bin_dir = "{PLUGINS_OF_CNI}"
conf_dir = "{home / "cni"}"
[{cri}.containerd]
snapshotter = "overlayfs"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def command_of(daemon: str, layout: ClusterLayout, programs: Mapping[str, Path]) -> list[str]:
    """Return the command of a daemon or of a node, inside the cluster's network."""
    home, network = _home(layout), network_of(layout.root)
    if daemon in node_names(99):
        file = str(layout.node(daemon) / "node.json")
        namespaces = ("--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")
        command = kubernetes_node.command_of("enter", file)
        return network.command(["unshare", *namespaces, "--mount-proc", *command])
    certificates, key = home / "certificates", home / "certificates" / "accounts.key"
    config = ("--kubeconfig", str(admin_kubeconfig(layout)))
    loopback = ("--bind-address", "127.0.0.1")
    options: Mapping[str, tuple[str, ...]] = {
        "etcd": (
            *("--data-dir", str(home / "etcd")),
            *("--listen-client-urls", "http://127.0.0.1:2379"),
            *("--advertise-client-urls", "http://127.0.0.1:2379"),
            *("--listen-peer-urls", "http://127.0.0.1:2380"),
            *("--initial-advertise-peer-urls", "http://127.0.0.1:2380"),
            *("--initial-cluster", "default=http://127.0.0.1:2380"),
            *("--log-level", "warn"),
            # The cluster's objects need not survive a crash of the machine.
            "--unsafe-no-fsync",
        ),
        "kube-apiserver": (
            *("--etcd-servers", "http://127.0.0.1:2379"),
            *("--bind-address", network.api_server),
            *("--advertise-address", network.api_server),
            *("--secure-port", "443"),
            *("--cert-dir", str(certificates)),
            *("--endpoint-reconciler-type", "none"),
            *("--service-cluster-ip-range", network.services),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-key-file", str(key)),
            *("--service-account-signing-key-file", str(key)),
            *("--token-auth-file", str(home / "tokens.csv")),
            *("--authorization-mode", "RBAC"),
            *("--kubelet-preferred-address-types", "InternalIP"),
            *("--event-ttl", "1h"),
        ),
        "kube-controller-manager": (
            *config,
            *loopback,
            *("--service-account-private-key-file", str(key)),
            *("--root-ca-file", str(authority_file(layout))),
            *("--use-service-account-credentials=false", "--leader-elect=false"),
            *("--node-monitor-grace-period", "10s", "--node-monitor-period", "1s"),
            *("--cert-dir", str(certificates)),
        ),
        "kube-scheduler": (*config, *loopback, "--leader-elect=false"),
    }
    return network.command([str(programs[daemon]), *options[daemon]])


def create_keys(layout: ClusterLayout) -> None:
    """Create the key with which the API server signs service accounts' tokens, unless it exists."""
    key = _home(layout) / "certificates" / "accounts.key"
    if not key.exists():
        key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = layout.logs / "certificates.log"
        run_logged(
            ["openssl", "genrsa", "-out", str(key), "2048"], {"PATH": os.defpath + ":/usr/bin"}, log
        )


def describe_unready_api_server(layout: ClusterLayout) -> str:
    """Return "" if the API server is ready, else what is missing."""
    if not authority_file(layout).exists():
        return f"{API_SERVER} to write its certificate"
    try:
        manager = admin_manager(layout)
        manager.version()
        manager.check_submission()
    except HopsGpuError as error:
        return f"{API_SERVER} to answer ({error})"
    return ""


def create_objects(layout: ClusterLayout, programs: Mapping[str, Path]) -> None:
    """Create what an administrator creates on a real cluster: the role of users, and accounts."""
    for file in (admin.KUBERNETES / "role.yaml", admin.KUBERNETES / "cluster-role.yaml"):
        _apply(layout, programs, file.read_text(encoding="utf-8"))
    subjects = [
        {"kind": "User", "name": USER, "apiGroup": "rbac.authorization.k8s.io"},
        {"kind": "ServiceAccount", "name": USER, "namespace": NAMESPACE},
    ]
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": USER, "namespace": NAMESPACE},
        }
    ]
    for kind, role in (("RoleBinding", "Role"), ("ClusterRoleBinding", "ClusterRole")):
        objects.append(
            {
                "apiVersion": "rbac.authorization.k8s.io/v1",
                "kind": kind,
                "metadata": {"name": f"hopsgpu-{USER}"},
                "subjects": subjects,
                "roleRef": {
                    "kind": role,
                    "name": "hopsgpu",
                    "apiGroup": "rbac.authorization.k8s.io",
                },
            }
        )
    _apply(layout, programs, yaml.safe_dump_all(objects))


def _apply(layout: ClusterLayout, programs: Mapping[str, Path], objects: str) -> None:
    command = [str(programs[KUBECTL]), "--kubeconfig", str(admin_kubeconfig(layout))]
    command += ["--namespace", NAMESPACE, "apply", "--filename", "-"]
    home = str(_home(layout))
    run_logged(command, {"PATH": os.defpath, "HOME": home}, layout.logs / "kubectl.log", objects)


def admin_manager(layout: ClusterLayout, gpu_resource: str = GPU_RESOURCE) -> KubernetesManager:
    """Return a client of the API server that may do everything."""
    properties = {"spark.master": master_url(layout), "spark.hopsgpu.gpu.resource": gpu_resource}
    environ = {"KUBECONFIG": str(admin_kubeconfig(layout))}
    return Kubernetes().connect(properties, environ)


def client_variables(layout: ClusterLayout) -> dict[str, str]:
    return {"KUBECONFIG": str(client_kubeconfig(layout))}


def release(layout: ClusterLayout) -> None:
    """Remove the network and the control groups that a stopped cluster leaves."""
    network = network_of(layout.root)
    remove_network(network)
    groups = sorted(Path("/sys/fs/cgroup").glob(f"*/{network.name}"))
    groups += [Path("/sys/fs/cgroup", network.name)]
    for group in groups:
        for directory, _, _ in os.walk(group, topdown=False):
            # A group whose processes have just ended may stay busy for a moment; it is empty.
            with contextlib.suppress(OSError):
                Path(directory).rmdir()
