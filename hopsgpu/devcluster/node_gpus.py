"""The nodes' GPUs: real ones divided among the nodes, or simulated ones."""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path

from hopsgpu.devcluster.layout import node_names
from hopsgpu.devcluster.mig_profiles import SIMULATED, memory_mib, simulated_gpu
from hopsgpu.gpu.node.devices import DriverError, run_bounded
from hopsgpu.gpu.node.nvidia_smi import read_output
from hopsgpu.units import count_of

# An arbitrary constant: simulated GPUs keep their UUIDs over restarts.
_NAMESPACE = uuid.UUID("6e0b1a52-6b43-4d0e-9c3e-0f6a2f6d7c11")
_ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class PlannedSlice:
    """A MIG device of a simulated GPU.

    Attributes:
        index: index among the MIG devices of its GPU; also the number of its GPU instance.
        memory: memory in MiB.
    """

    index: int
    uuid: str
    profile: str
    memory: int


@dataclass(frozen=True)
class PlannedGpu:
    """A GPU of a node.

    Attributes:
        index: index in nvidia-smi's list; within the node for a simulated GPU.
        minor: minor number of the device file.
        memory: memory in MiB.
        slices: its MIG devices; none if MIG is off.
    """

    index: int
    minor: int
    uuid: str
    name: str
    memory: int
    slices: tuple[PlannedSlice, ...] = ()


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of each node.

    Attributes:
        smi: the real nvidia-smi; None if the GPUs are simulated, or there are none.
        source: "real", "simulated" or "none", and why.
    """

    nodes: dict[str, tuple[PlannedGpu, ...]]
    smi: str | None
    source: str


def plan_gpus(root: Path, nodes: int, per_node: int, profiles: tuple[str, ...] = ()) -> GpuPlan:
    """Return real GPUs if the machine has enough of them, else simulated ones.

    The simulated GPUs of two clusters, with different roots, differ.

    Args:
        profiles: the MIG devices of each GPU, all of which are then simulated.
    """
    names = node_names(nodes)
    if not per_node:
        return GpuPlan(dict.fromkeys(names, ()), None, "none")
    if profiles:
        source = f"simulated, each with {count_of(len(profiles), 'MIG device')}"
        return GpuPlan(
            {n: _simulated_gpus(root, n, per_node, profiles) for n in names}, None, source
        )
    smi = shutil.which("nvidia-smi")
    real = _query_gpus(smi) if smi else ()
    requested = nodes * per_node
    if smi and len(real) >= requested:
        shares = {n: real[i * per_node : (i + 1) * per_node] for i, n in enumerate(names)}
        return GpuPlan(shares, smi, f"real: {requested} of this machine's {len(real)}")
    if real:
        has = f"{len(real)} GPU{'s' if len(real) > 1 else ''}"
        possible = (1, len(real)) if len(real) < nodes else (nodes, len(real) // nodes)
        why = (
            f"simulated: this machine has {has}, {requested} were requested; "
            f"--nodes {possible[0]} --gpus-per-node {possible[1]} uses the real ones"
        )
    else:
        why = "simulated: nvidia-smi does not answer"
    return GpuPlan({n: _simulated_gpus(root, n, per_node) for n in names}, None, why)


def _simulated_gpus(
    root: Path, node: str, per_node: int, profiles: tuple[str, ...] = ()
) -> tuple[PlannedGpu, ...]:
    name, memory = simulated_gpu(profiles)

    def uuid_of(path: str) -> uuid.UUID:
        return uuid.uuid5(_NAMESPACE, f"{root}/{node}/{path}")

    return tuple(
        PlannedGpu(
            index=i,
            minor=i,
            uuid=f"GPU-{uuid_of(str(i))}",
            name=name,
            memory=memory,
            slices=tuple(
                PlannedSlice(k, f"MIG-{uuid_of(f'{i}/{k}')}", profile, memory_mib(profile))
                for k, profile in enumerate(profiles)
            ),
        )
        for i in range(per_node)
    )


def _query_gpus(smi: str) -> tuple[PlannedGpu, ...]:
    """Return the GPUs that an nvidia-smi reports; none if it fails or cannot be understood."""
    try:
        code, out, _ = run_bounded([smi, "-q", "-x"], _ANSWER_SECONDS)
        gpus = parse_query(out) if code == 0 else ()
    except (OSError, DriverError, ValueError):
        return ()
    # Another cluster's stand-in may be on the PATH, for example in a container.
    return () if any(gpu.name.startswith(SIMULATED) for gpu in gpus) else gpus


def parse_query(xml: str) -> tuple[PlannedGpu, ...]:
    """Return the GPUs in the XML of `nvidia-smi -q -x`.

    Raises:
        ValueError: the text is incomplete, or a GPU has no minor number or memory (a MIG slice, a
            vGPU guest).
    """
    output = read_output(xml)
    if output is None or not output.is_consistent:
        raise ValueError("the output of nvidia-smi is incomplete")
    return tuple(
        PlannedGpu(
            index=i,
            minor=int(gpu.findtext("minor_number", "")),
            uuid=gpu.findtext("uuid", ""),
            name=gpu.findtext("product_name", ""),
            memory=int(gpu.findtext("fb_memory_usage/total", "").partition(" ")[0]),
        )
        for i, gpu in enumerate(output.gpus)
    )
