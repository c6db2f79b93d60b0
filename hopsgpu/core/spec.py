"""The request and the plan of a launch: frozen values, validated at construction."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hopsgpu.core import html
from hopsgpu.core.boundary import public_class
from hopsgpu.core.gpu_names import is_slice
from hopsgpu.core.image_names import check_image_name
from hopsgpu.core.redaction import redact
from hopsgpu.errors import ConfigError
from hopsgpu.units import MIB, count_of

# hopsgpu sets these in every rank, so a user's env_vars may not.
RESERVED_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "HOME",
        "JAX_COORDINATOR_ADDRESS",
        "JAX_LOCAL_DEVICE_IDS",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NODE_RANK",
        "PYTHONPATH",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "TF_CONFIG",
        "TMPDIR",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "WORLD_SIZE",
    }
)
# A file name may have 255 bytes. A run's id adds a time and an id to the name, and the name of a
# draft adds more.
_MAX_NAME_BYTES = 200
_NAME = re.compile(r"[\w][\w.+=-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(value: object, argument: str) -> str:
    """Return a name that is safe as one component of a path, Unicode-normalised (NFC).

    Raise ConfigError unless the value is a string of up to 100 characters and 200 bytes of UTF-8.
    It must consist of letters, digits and `_ . + = -`, and begin with a letter, a digit or `_`.
    """
    if isinstance(value, str):
        name = unicodedata.normalize("NFC", value)
        if _NAME.fullmatch(name) and len(name) <= 100:
            if (size := len(name.encode())) <= _MAX_NAME_BYTES:
                return name
            raise ConfigError(
                f"{argument}={value!r}: must be a name of at most {_MAX_NAME_BYTES} bytes in UTF-8,"
                f" not {size}: choose a shorter one"
            )
    raise ConfigError(
        f"{argument}={value!r}: must be a name of at most 100 letters, digits and '_.+=-' that "
        "begins with a letter, a digit or '_'"
    )


def check_count(value: object, name: str, least: int) -> None:
    """Raise ConfigError unless an argument is an integer ≥ `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}: must be an integer ≥ {least}")


# Linux accepts 128 KiB for one string of the environment.
_MAX_VARIABLE = 120 * 1024


PLACEMENTS = (None, "pack", "spread")
VISIBLE = (None, "container", "rank")
# A discovery script is shipped for each number of GPUs up to this number.
MAX_GPUS = 64
MAX_RANKS_PER_GPU = 16
# 0.33 means 1/3.
_FRACTION_ERROR = 0.02


@public_class
@dataclass(frozen=True)
class GpuRequest:
    """The GPUs of one rank.

    Attributes:
        per_worker: whole GPUs of each rank, 0 for a gang on CPUs; or 1/k, for example 0.5, if k
            ranks of one container share one GPU.
    """

    __module__ = "hopsgpu.types"

    per_worker: float = 1

    def __post_init__(self) -> None:
        count = self.per_worker
        if isinstance(count, float) and 0 < count < 1:
            parts = round(1 / count)
            if not 2 <= parts <= MAX_RANKS_PER_GPU or abs(count * parts - 1) > _FRACTION_ERROR:
                raise ConfigError(
                    f"gpus_per_worker={count!r}: a fraction must be 1/2, 1/3, … or"
                    f" 1/{MAX_RANKS_PER_GPU}; 1/k puts k ranks on one GPU"
                )
            return
        check_count(count, "gpus_per_worker", 0)
        if count > MAX_GPUS:
            raise ConfigError(f"gpus_per_worker={count!r}: must be at most {MAX_GPUS}")

    @property
    def sharing(self) -> int:
        """The number of ranks on one GPU: k for 1/k, else 1."""
        return round(1 / self.per_worker) if 0 < self.per_worker < 1 else 1

    def of(self, ranks: int) -> int:
        """Return the number of GPUs of a container whose ranks are a multiple of `sharing`."""
        return ranks // self.sharing if self.sharing > 1 else int(self.per_worker) * ranks


@public_class
@dataclass(frozen=True)
class GangSpec:
    """A gang, as requested.

    Attributes:
        name: name of the run, part of its id.
        workers: the world size; the largest one of an elastic gang.
        least_workers: the smallest world size of an elastic gang; None for a fixed-size gang.
        cores_per_worker: cores of each rank; None for the node's share of cores per GPU.
        memory_per_worker: bytes that a rank may use.
        placement: "pack" for as many ranks as fit into one container, "spread" for one on each
            node, None to leave it to the cluster manager.
        gpu_type: words of the GPUs' product name, or None for any GPU.
        parameter_servers: processes without a GPU beside the workers, for TensorFlow's
            ParameterServerStrategy.
        visible: "container" if a rank sees the GPUs of its container, "rank" if it sees only its
            own. None means "rank" if ranks share a GPU, otherwise "container".
        model: name under which the model is published, or None.
        resume: id of the run whose checkpoints this run resumes from, or None.
        acquire_timeout: seconds that the gang may wait for its executors, None for no bound.
        run_timeout: seconds that the ranks may take in one attempt, None for no bound.
        gpu_idle_timeout: seconds that all GPUs of the gang may idle while the function runs,
            None for no bound.
        retries: how often the gang starts again after a failure.
        python_env: the Python environment of the ranks, as the user named it, or None.
        independent_ranks: whether each rank trains by itself.
        image: the container image in which the executors run, or None.
    """

    name: str
    workers: int = 1
    least_workers: int | None = None
    gpus: GpuRequest = field(default_factory=GpuRequest)
    cores_per_worker: int | None = None
    memory_per_worker: int = 4 * 2**30
    placement: str | None = None
    gpu_type: str | None = None
    parameter_servers: int = 0
    visible: str | None = None
    model: str | None = None
    resume: str | None = None
    acquire_timeout: float | None = 600.0
    run_timeout: float | None = None
    gpu_idle_timeout: float | None = None
    retries: int = 0
    env_vars: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    python_env: str | None = None
    independent_ranks: bool = False
    image: str | None = None

    def __post_init__(self) -> None:
        _check_workers(self.workers, self.least_workers, self.gpus)
        if self.cores_per_worker is not None:
            check_count(self.cores_per_worker, "cores_per_worker", 1)
        if self.placement not in PLACEMENTS:
            raise ConfigError(
                f"placement={self.placement!r}: must be 'pack' (ranks share containers), 'spread'"
                " (one rank on each node) or None"
            )
        _check_gpu_type(self.gpu_type, self.gpus)
        check_count(self.parameter_servers, "parameter_servers", 0)
        if self.parameter_servers and self.is_elastic:
            raise ConfigError(
                f"parameter_servers={self.parameter_servers} with"
                f" workers=({self.least_workers}, {self.workers}): an elastic gang has no parameter"
                " servers; give the number of workers"
            )
        if self.parameter_servers and self.workers < 2:
            raise ConfigError(
                f"parameter_servers={self.parameter_servers} with workers={self.workers}: rank 0 is"
                " the chief and counts in workers, so workers must be at least 2"
            )
        check_count(self.retries, "retries", 0)
        if self.visible not in VISIBLE:
            raise ConfigError(
                f"visible={self.visible!r}: must be 'container' (the GPUs of all its ranks, in the"
                " order of LOCAL_RANK), 'rank' (its own GPUs only) or None"
            )
        _check_independent(self)
        if self.image is not None:
            check_image_name(self.image, "image")
        if self.visible is None and (self.gpus.sharing > 1 or self.independent_ranks):
            # LOCAL_RANK is no index of a GPU if ranks share a GPU, and is 0 for independent ranks.
            object.__setattr__(self, "visible", "rank")
        object.__setattr__(self, "name", check_name(self.name, "name"))
        object.__setattr__(self, "env_vars", _check_variables(self.env_vars))

    @property
    def is_elastic(self) -> bool:
        return self.least_workers is not None

    @property
    def least(self) -> int:
        return self.workers if self.least_workers is None else self.least_workers


def _check_independent(spec: GangSpec) -> None:
    if not isinstance(spec.independent_ranks, bool):
        raise ConfigError(f"independent_ranks={spec.independent_ranks!r}: must be True or False")
    if not spec.independent_ranks:
        return
    if spec.parameter_servers:
        raise ConfigError(
            f"independent_ranks=True with parameter_servers={spec.parameter_servers}: ranks that"
            " train by themselves have no parameter servers; leave one of the two out"
        )
    if spec.visible == "container":
        raise ConfigError(
            "independent_ranks=True with visible='container': each rank would use the container's"
            " first GPU; leave visible out, so that a rank sees its own GPUs only"
        )


def _check_workers(maximum: object, minimum: object, gpus: GpuRequest) -> None:
    argument = f"workers={maximum!r}" if minimum is None else f"workers=({minimum!r}, {maximum!r})"
    for count in (maximum,) if minimum is None else (minimum, maximum):
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ConfigError(
                f"{argument}: must be an integer ≥ 1, or the smallest and the largest of an elastic"
                " gang, as in (2, 8)"
            )
        if count % gpus.sharing:
            raise ConfigError(
                f"{argument} with gpus_per_worker={gpus.per_worker!r}: workers"
                f" must be a multiple of {gpus.sharing}, so that no part of a GPU is left over"
            )
    if isinstance(minimum, int) and isinstance(maximum, int) and minimum > maximum:
        example = f"({maximum}, {minimum})"
        raise ConfigError(f"{argument}: the smallest size comes first, as in {example}")


def _check_gpu_type(gpu_type: object, gpus: GpuRequest) -> None:
    if gpu_type is None:
        return
    if not isinstance(gpu_type, str) or not gpu_type.strip():
        raise ConfigError(
            f"gpu_type={gpu_type!r}: must be part of a GPU's product name, such as 'A100'"
        )
    if not gpus.per_worker:
        raise ConfigError(
            f"gpu_type={gpu_type!r} with gpus_per_worker=0: request GPUs, or leave gpu_type out"
        )
    if gpus.per_worker > 1 and is_slice(gpu_type):
        raise ConfigError(
            f"gpu_type={gpu_type!r} with gpus_per_worker={gpus.per_worker!r}: a CUDA process uses"
            " only one MIG device: set gpus_per_worker=1 and use more workers"
        )


def _size(value: str) -> int:
    """Return the bytes that a text takes in a rank's environment."""
    return len(value.encode("utf-8", "surrogateescape"))


def _check_variables(variables: object) -> Mapping[str, str]:
    if not isinstance(variables, Mapping):
        raise ConfigError(f"env_vars={variables!r}: must be a mapping of names to strings")
    for name, value in variables.items():
        if not (isinstance(name, str) and _VARIABLE.fullmatch(name) and isinstance(value, str)):
            raise ConfigError(
                f"env_vars: {name!r}: the name must consist of letters, digits and '_', and not "
                "begin with a digit, and the value must be a string"
            )
        if len(name) + _size(value) > _MAX_VARIABLE:
            raise ConfigError(
                f"env_vars: {name} is longer than {_MAX_VARIABLE} bytes, the limit of Linux: pass"
                " it in kwargs, or in a file on the lake"
            )
        if "\0" in value:
            raise ConfigError(f"env_vars: the value of {name!r} contains a NUL character")
        if name in RESERVED_VARIABLES or name.startswith("HOPSGPU_"):
            raise ConfigError(
                f"env_vars sets {name}, which hopsgpu sets in every rank: leave it out "
                f"(set by hopsgpu: {', '.join(sorted(RESERVED_VARIABLES))}, HOPSGPU_*)"
            )
    if sum(len(name) + _size(value) for name, value in variables.items()) > 4 * _MAX_VARIABLE:
        raise ConfigError(
            f"env_vars are longer than {4 * _MAX_VARIABLE} bytes in total: pass values in kwargs"
        )
    return MappingProxyType(dict(variables))


@dataclass(frozen=True)
class ExecutorShape:
    """The resources that one executor requests from the cluster manager.

    Attributes:
        cores: virtual cores.
        heap_mib: the JVM's heap.
        overhead_mib: memory of the ranks and of Python.
        marker: YARN resource that marks nodes with the GPU type, or None; one unit is requested.
        gpu_type: words of the product name that its discovery script prefers, or None.
    """

    cores: int
    gpus: int
    heap_mib: int
    overhead_mib: int
    marker: str | None = None
    gpu_type: str | None = None


# The tasks in the executor's JVM only wait. Spark refuses heaps below 450 MB.
HEAP_MIB = 512
# Memory for the JVM outside its heap, Spark's Python daemon, the agent, and fork servers. A fork
# server takes 530 MiB with torch imported and 740 MiB with TensorFlow. YARN counts pages that a
# fork server shares with its ranks in each of these processes.
AGENT_MIB = 1536


def shape_of(spec: GangSpec, cores_per_gpu: int, ranks: int = 1) -> ExecutorShape:
    """Return the shape of an executor in which `ranks` ranks share the container.

    All executors of a gang have the same shape, so each executor has memory for the largest number
    of parameter servers that one executor gets. The nodes' cores per GPU count if the spec names no
    cores.
    """
    gpus = spec.gpus.of(ranks)
    cores = spec.cores_per_worker or max(cores_per_gpu * gpus // ranks, 1)
    servers = -(-spec.parameter_servers * ranks // spec.workers)
    rank_mib = -(-spec.memory_per_worker // MIB)
    overhead = rank_mib * (ranks + servers) + AGENT_MIB
    return ExecutorShape(cores * ranks, gpus, HEAP_MIB, overhead, gpu_type=spec.gpu_type)


@dataclass(frozen=True)
class LaunchPlan:
    """The plan of a launch; printing it starts nothing.

    Attributes:
        spec: the gang, as requested.
        executors: number of executors; the largest number of an elastic gang.
        ranks_per_executor: ranks in each executor.
        shape: resources that each executor requests from the cluster manager.
        queue: path of YARN's queue, such as "root.default"; "" without YARN.
        environment: variables that every rank gets with the same value.
        paths: URLs on the lake: "root", "run", "model", "resume" for the run that this run resumes
            from, and "data", or "data.NAME" for each of several tables.
        hosts: nodes that have GPUs of the wanted type; None if any node will do.
        warnings: warnings before the launch.
    """

    __module__ = "hopsgpu.types"

    spec: GangSpec
    executors: int
    ranks_per_executor: int
    shape: ExecutorShape
    queue: str
    environment: Mapping[str, str] = field(repr=False)
    paths: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None

    @property
    def least_executors(self) -> int:
        if not self.spec.is_elastic:
            return self.executors
        return self.spec.least // self.ranks_per_executor

    def __str__(self) -> str:
        s, servers = self.shape, self.spec.parameter_servers
        ranks = count_of(self.spec.workers, "rank")
        executors = count_of(self.executors, "executor")
        if self.spec.is_elastic:
            ranks = f"{self.spec.least} to {ranks}"
            executors = f"{self.least_executors} to {executors}"
        hosts = ", ".join(sorted(self.hosts or ()))
        # Only an executor on a cluster has a JVM, and so a heap.
        where = f", queue {self.queue}" if self.queue else "" if s.heap_mib else ", on this machine"
        heap = f"{s.heap_mib} MiB heap + " if s.heap_mib else ""
        lines = [
            f"{self.spec.name}: {ranks} in {executors} of {self.ranks_per_executor}{where}",
            *([f"  {count_of(servers, 'parameter server')} beside them"] if servers else []),
            *([f"  GPUs of type {self.spec.gpu_type}, on {hosts}"] if hosts else []),
            f"  each executor: {count_of(s.gpus, 'GPU')}, {count_of(s.cores, 'core')},"
            f" {heap}{s.overhead_mib} MiB{' overhead' if heap else ''}"
            f"{f', 1 {s.marker}' if s.marker else ''}",
            *([f"  image: {self.spec.image}"] if self.spec.image else []),
            *([f"  Python environment: {self.spec.python_env}"] if self.spec.python_env else []),
            *(f"  {what}: {path}" for what, path in self.paths.items()),
            *(f"  {name}={value}" for name, value in redact(self.environment).items()),
            *(f"  warning: {text}" for text in self.warnings),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html.box(html.pre(str(self)))
