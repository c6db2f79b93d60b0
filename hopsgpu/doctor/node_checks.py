"""Pure checks of the facts that containers on the nodes report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hopsgpu.backends.spark.spark_versions import other_python
from hopsgpu.doctor.node_probe import Framework, NodeFacts
from hopsgpu.doctor.report import Check, join_names, ok, unknown, wrong
from hopsgpu.frameworks.cuda import oldest_driver, version_of
from hopsgpu.gpu.node.health import BAD, HEALTHY
from hopsgpu.units import count_of

NAMES = (
    "discovery",
    "executor python",
    "executor java",
    "executor spark",
    "gpu leases",
    "isolation",
    "gpu events",
    "cuda",
)


@dataclass(frozen=True)
class NodeRemedies:
    """The remedies that name a cluster manager's own settings.

    Attributes:
        discovery: for a node whose GPUs are not listed.
        spark: for a node with another Spark than the driver's; `{version}` stands for the driver's.
        leases: for a lease directory that not all users can use.
        gang: for a gang that ended with Spark's message.
        python: for another Python than the driver's; `{version}` stands for the driver's minor one.
        late: for executors that did not start in time.
        refusal: words of an error by which the cluster manager itself does not start executors,
            for `gang` in place of `late`; "" for none.
    """

    discovery: str
    spark: str
    leases: str
    gang: str
    python: str = (
        "PYSPARK_PYTHON (or spark.pyspark.python) = a Python {version} that every node has"
    )
    late: str = "run hopsgpu doctor --seconds 180"
    refusal: str = ""


def check_nodes(
    facts: Sequence[NodeFacts],
    failed: Mapping[str, str],
    skipped: Mapping[str, str],
    problem: str,
    *,
    python: str,
    spark: str,
    totals: Mapping[str, int],
    remedies: NodeRemedies,
) -> tuple[Check, ...]:
    """Return all checks of the nodes.

    Args:
        facts: facts of the nodes on which a container ran.
        failed: by host, why a container failed there.
        skipped: by host, why no container was requested.
        problem: the error that ended the gang, or "".
        python, spark: versions of the driver's Python and Spark.
        totals: GPUs that the cluster manager has, by host.
    """
    checks = [check_discovery(facts, failed, skipped, remedies)]
    python_fix = remedies.python.format(version=".".join(python.split(".")[:2]))
    if not facts:
        rest = [unknown(name, "no node could be checked") for name in NAMES[1:]]
        if versions := other_python(problem):
            rest[0] = wrong(
                NAMES[1], f"the driver runs Python {python}, they {versions[0]}", python_fix
            )
        elif program := missing_program(problem):
            rest[0] = wrong(NAMES[1], f"the nodes cannot run {program}", python_fix)
        return (*checks, *rest)
    return (
        *checks,
        check_executor_python(facts, python, python_fix),
        check_executor_java(facts),
        check_executor_spark(facts, spark, remedies),
        check_leases(facts, remedies),
        check_isolation(facts, totals),
        check_gpu_events(facts),
        check_cuda(facts),
    )


def missing_program(error: str) -> str | None:
    """Return the executors' Python if an error says that Spark could not start it."""
    match = re.search(r'Cannot run program "([^"]+)"', error)
    return None if match is None else match[1]


def check_discovery(
    facts: Sequence[NodeFacts],
    failed: Mapping[str, str],
    skipped: Mapping[str, str],
    remedies: NodeRemedies,
) -> Check:
    name = NAMES[0]
    nothing = {n.host: "the discovery script left no list of GPUs" for n in facts if not n.gpus}
    unhealthy = [
        f"{node.host}: {gpu.address} ({gpu.name}) is {gpu.state}: {gpu.reason}"
        for node in facts
        for gpu in node.gpus
        if gpu.state != HEALTHY
    ]
    reasons: dict[str, list[str]] = {}
    for host, why in skipped.items():
        reasons.setdefault(why, []).append(host)
    unseen = [f"{join_names(hosts)} not checked: {why}" for why, hosts in reasons.items()]
    broken = [f"{host}: {why}" for host, why in sorted({**failed, **nothing}.items())]
    well = [node for node in facts if node.gpus]
    where = join_names(node.host for node in well)
    seen = f"ran on {count_of(len(well), 'node')} ({where})" if well else "ran nowhere"
    if broken:
        return wrong(
            name,
            f"{seen}, and not on {join_names(sorted({**failed, **nothing}))}",
            remedies.discovery,
            broken + unhealthy + unseen,
        )
    if any(gpu.state == BAD for node in facts for gpu in node.gpus):
        return wrong(
            name, f"{seen}; some GPUs are bad", "check or replace these GPUs", unhealthy + unseen
        )
    if unseen:
        return unknown(name, f"{seen}; {len(skipped)} not checked", "", unhealthy + unseen)
    return ok(name, seen, unhealthy)


def check_executor_python(facts: Sequence[NodeFacts], driver: str, fix: str) -> Check:
    """Check whether the executors' Python is the driver's, except for the patch version."""
    name = NAMES[1]
    other = [node for node in facts if version_of(node.python)[:2] != version_of(driver)[:2]]
    if other:
        return wrong(
            name,
            f"the driver runs Python {driver},"
            f" and {join_names(n.host for n in other)} a different one",
            fix,
            (f"{node.host}: Python {node.python} ({node.executable})" for node in other),
        )
    return ok(name, _group_by_text(facts, lambda node: f"{node.python} ({node.executable})"))


def check_executor_java(facts: Sequence[NodeFacts]) -> Check:
    """Report which Java the executors run; Spark accepts that version, because they run."""
    if not any(node.java for node in facts):
        return unknown(NAMES[2], "the nodes' JAVA_HOME does not show the version")
    return ok(NAMES[2], _group_by_text(facts, lambda node: node.java or "unknown"))


def check_executor_spark(facts: Sequence[NodeFacts], driver: str, remedies: NodeRemedies) -> Check:
    name = NAMES[3]
    other = [node for node in facts if node.spark not in ("", driver)]
    if other:
        return wrong(
            name,
            f"the driver runs Spark {driver},"
            f" and {join_names(n.host for n in other)} a different one",
            remedies.spark.format(version=driver),
            (f"{node.host}: Spark {node.spark}" for node in other),
        )
    if not any(node.spark for node in facts):
        return unknown(name, "the executors' class path does not show the version")
    return ok(name, _group_by_text(facts, lambda node: node.spark or "unknown"))


def check_leases(facts: Sequence[NodeFacts], remedies: NodeRemedies) -> Check:
    """Check whether all users of a node can lease its GPUs in one directory."""
    name = NAMES[4]
    broken = [f"{node.host}: {node.leases.problem}" for node in facts if node.leases.problem]
    if broken:
        return wrong(
            name,
            f"not all users can use the lease directory on {count_of(len(broken), 'node')}",
            remedies.leases,
            broken,
        )
    return ok(name, _group_by_text(facts, lambda node: f"{node.leases.path}, sticky and writable"))


def check_isolation(facts: Sequence[NodeFacts], totals: Mapping[str, int]) -> Check:
    """Report whether a container sees only its own GPUs; both answers are fine."""
    name = NAMES[5]

    def isolation_of(node: NodeFacts) -> str | None:
        if node.is_isolated:
            return "on"
        if node.visible is None or totals.get(node.host, 0) <= len(node.gpus):
            return None  # the container has all of the node's GPUs
        return "off" if node.visible > len(node.gpus) else "on"

    kinds = {node.host: isolation_of(node) for node in facts}
    off = [host for host, kind in kinds.items() if kind == "off"]
    on = [host for host, kind in kinds.items() if kind == "on"]
    if off:
        rest = f"; on: {join_names(on)}" if on else ""
        return ok(
            name,
            f"off: {join_names(off)}{rest}; leases separate only hopsgpu's executors",
        )
    if on:
        return ok(name, f"on: {join_names(on)}")
    return unknown(name, "no container could have seen more GPUs than its own")


def check_gpu_events(facts: Sequence[NodeFacts]) -> Check:
    """Check whether errors of GPUs are noticed during training, which needs NVML."""
    name = NAMES[6]
    bare = [node for node in facts if not node.nvml]
    if not bare:
        return ok(name, _group_by_text(facts, lambda node: f"nvidia-ml-py {node.nvml}"))
    where = join_names(node.host for node in bare)
    if all(gpu.is_simulated for node in bare for gpu in node.gpus):
        return unknown(name, f"no nvidia-ml-py on {where}, whose GPUs are simulated")
    return wrong(
        name,
        f"no nvidia-ml-py on {where}: nvidia-smi lists the GPUs there, but XIDs and lost GPUs"
        " are not noticed during training, and GPU utilisation is not measured",
        "pip install nvidia-ml-py in the executors' Python",
        (f"{node.host}: {node.executable}" for node in bare),
    )


def check_cuda(facts: Sequence[NodeFacts]) -> Check:
    """Check whether each node's driver supports the CUDA of the executors' frameworks."""
    name = NAMES[7]
    gpus = [gpu for node in facts for gpu in node.gpus]
    if not gpus:
        return unknown(name, "no GPU was assigned")
    if all(gpu.is_simulated for gpu in gpus):
        frameworks = _group_by_text(facts, lambda node: _frameworks_text(node) or "no framework")
        return unknown(name, f"these GPUs are simulated and have no driver ({frameworks})")
    problems = [text for node in facts for text in _cuda_problems(node)]
    if problems:
        return wrong(
            name,
            "frameworks of the executors cannot use the GPUs, in"
            f" {count_of(len(problems), 'case')}",
            "install a newer NVIDIA driver on these nodes, or a framework built with an older CUDA"
            " in the executors' Python",
            problems,
        )
    bare = [node.host for node in facts if not node.frameworks]
    if bare:
        return unknown(name, f"no torch, tensorflow or jax on {join_names(bare)}")

    def describe(node: NodeFacts) -> str:
        return f"{_frameworks_text(node)}; driver {join_names(_gpu_driver_versions(node))}"

    return ok(name, _group_by_text(facts, describe))


def _cuda_problems(node: NodeFacts) -> Iterable[str]:
    with_cuda = [framework for framework in node.frameworks if framework.cuda]
    if node.frameworks and not with_cuda:
        yield f"{node.host}: {_frameworks_text(node)}: they would train on the CPU"
    for framework in with_cuda:
        oldest = oldest_driver(framework.cuda)
        for driver in _gpu_driver_versions(node):
            if oldest is not None and version_of(driver) < version_of(oldest):
                needs = f"{_framework_text(framework)} needs driver {oldest}"
                yield f"{node.host}: {needs}, but it has {driver}"


def _gpu_driver_versions(node: NodeFacts) -> list[str]:
    return sorted({gpu.driver for gpu in node.gpus if gpu.driver and not gpu.is_simulated})


def _frameworks_text(node: NodeFacts) -> str:
    return join_names(map(_framework_text, node.frameworks))


def _framework_text(framework: Framework) -> str:
    cuda = f"CUDA {framework.cuda}" if framework.cuda else "no CUDA"
    return f"{framework.name} {framework.version} ({cuda})"


def _group_by_text(facts: Sequence[NodeFacts], describe: Callable[[NodeFacts], str]) -> str:
    """Return the nodes' texts; a text that is the same on all nodes comes once, without hosts."""
    hosts_by_text: dict[str, list[str]] = {}
    for node in facts:
        hosts_by_text.setdefault(describe(node), []).append(node.host)
    if len(hosts_by_text) == 1:
        return next(iter(hosts_by_text))
    return "; ".join(f"{join_names(hosts)}: {text}" for text, hosts in hosts_by_text.items())
