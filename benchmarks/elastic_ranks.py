"""What a rank of an elastic training runs, under each launcher, and what it notes of its steps.

`python -m benchmarks.elastic_ranks torchrun` is one rank under torchrun, `… torchft` one replica of
torchft, and `… ray` the driver of a Ray Train run, whose ranks call `train` too.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Seconds between two notes of steps, but for the first step of a world, which is always noted.
NOTE_SECONDS = 0.1
# Steps between two checkpoints: at a few hundred steps a second, each second or so.
SAVED = 200
_BATCH, _WIDTH = 32, 256
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Event:
    """A line of the file that all processes of a training append to.

    Attributes:
        time: seconds since the epoch, by the one machine's clock.
        event: "ready" (a process is about to join), "nodes" (the launcher counts `world` members),
            "step" (ended in a world of this size) or "broken" (a collective failed).
        world: ranks of the world; 0 where there is none yet.
        rank: of the process; -1 where it has none yet.
        step: steps that the model has made.
        pid: of the process.
    """

    time: float
    event: str
    world: int
    rank: int
    step: int
    pid: int


class Trace:
    """Appends events to a file; several processes share it.

    Args:
        path: of the file, which exists.
    """

    def __init__(self, path: Path) -> None:
        # A line is one write at the file's end, so that those of processes do not mix.
        self._file = path.open("ab", buffering=0)
        self._world = 0
        self._noted = 0.0

    def note(self, event: str, world: int = 0, rank: int = -1, step: int = 0) -> None:
        """Append an event."""
        event_ = Event(time.time(), event, world, rank, step, os.getpid())
        self._file.write((json.dumps(asdict(event_)) + "\n").encode())

    def step(self, world: int, rank: int, step: int) -> None:
        """Append the first step of a world, and then one each `NOTE_SECONDS`."""
        now = time.monotonic()
        if world != self._world or now - self._noted >= NOTE_SECONDS:
            self._world, self._noted = world, now
            self.note("step", world, rank, step)


def train(events: Path, checkpoint: Path, seconds: float, saved: int = SAVED) -> None:
    """Train a tiny model with DDP, in the process group that a launcher has made.

    The steps go on from the checkpoint, if there is one; rank 0 saves.

    Args:
        events: file that events are appended to.
        checkpoint: a local file.
        seconds: after which this rank ends in any case.
        saved: steps between two checkpoints; 0 for none.
    """
    from torch import distributed

    rank = distributed.get_rank()

    def saves(step: int) -> bool:
        return rank == 0 and is_due(step, saved)

    def keep(path: Path, step: int) -> None:
        path.replace(checkpoint)

    latest = checkpoint if checkpoint.exists() else None
    train_in(events, seconds, latest, checkpoint.with_suffix(".half"), saves, keep)


def is_due(step: int, saved: int) -> bool:
    """Return whether a checkpoint is to be saved after a step, by `train`'s `saved`."""
    return saved > 0 and step % saved == 0


def train_in(
    events: Path,
    seconds: float,
    saved: Path | None,
    local: Path,
    saves: Callable[[int], bool],
    keep: Callable[[Path, int], None],
) -> None:
    """Train a tiny model with DDP, from a checkpoint on.

    Args:
        events: file that events are appended to.
        seconds: after which this rank ends in any case.
        saved: the checkpoint, or None.
        local: file to write checkpoints to.
        saves: returns whether this rank is to write a checkpoint after a step.
        keep: is given each checkpoint, and its step.
    """
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    trace, ends = Trace(events), time.monotonic() + seconds
    world, rank = distributed.get_world_size(), distributed.get_rank()
    model, batch, target = _model()
    step = 0 if saved is None else _load(saved, model)
    try:
        ranks = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        while time.monotonic() < ends:
            _step(ranks, optimizer, batch, target)
            step += 1
            trace.step(world, rank, step)
            if saves(step):
                torch.save({"model": model.state_dict(), "step": step}, local)
                keep(local, step)
    except RuntimeError:
        trace.note("broken", world, rank, step)
        raise


def _model() -> tuple[Any, Any, Any]:
    """Return a model, the same in all processes, a batch and what is to come of it."""
    import torch

    # As torchrun sets it for its ranks: a core, or less, is each one's share.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 1)
    )
    return model, torch.randn(_BATCH, _WIDTH), torch.randn(_BATCH, 1)


def _step(
    model: Any,
    optimizer: Any,
    batch: Any,
    target: Any,
    average: Callable[[], None] = lambda: None,
) -> None:
    """Make a step; `average` is for a model whose `backward` does not average the gradients."""
    from torch.nn.functional import mse_loss

    optimizer.zero_grad()
    mse_loss(model(batch), target).backward()
    average()
    optimizer.step()


def _load(checkpoint: Path, model: Any) -> int:
    """Load a checkpoint; return its step."""
    import torch

    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    return int(state["step"])


def torchrun_rank(events: Path, checkpoint: Path, seconds: float, saved: int) -> None:
    """Run one rank under torchrun."""
    from torch import distributed

    distributed.init_process_group("gloo")
    train(events, checkpoint, seconds, saved)


def ray_driver(
    events: Path, checkpoint: Path, seconds: float, workers: tuple[int, int], interval: float | None
) -> None:
    """Run Ray Train's elastic trainer on the cluster of RAY_ADDRESS, and note how many nodes live.

    Args:
        events: file that events are appended to.
        checkpoint: a local file.
        seconds: after which the ranks end.
        workers: least and most.
        interval: seconds between two looks whether the world can grow; None for Ray's default.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(log_to_driver=False)
    threading.Thread(target=_note_nodes, args=(Trace(events),), daemon=True).start()
    looks = {} if interval is None else {"elastic_resize_monitor_interval_s": interval}
    trainer = TorchTrainer(
        _ray_rank,
        train_loop_config={"events": events, "checkpoint": checkpoint, "seconds": seconds},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers, **looks),
        run_config=RunConfig(
            storage_path=str(checkpoint.parent), failure_config=FailureConfig(max_failures=-1)
        ),
    )
    trainer.fit()


def _ray_rank(config: Mapping[str, Any]) -> None:
    train(config["events"], config["checkpoint"], config["seconds"])


def _note_nodes(trace: Trace) -> None:
    """Note the number of living nodes that have a CPU, each time that it changes."""
    import ray

    before = -1
    while True:
        alive = sum(n["Alive"] and n["Resources"].get("CPU", 0) > 0 for n in ray.nodes())
        if alive != before:
            before = alive
            trace.note("nodes", alive)
        # Ray offers no subscription to its nodes.
        time.sleep(_POLL_SECONDS)


def torchft_replica(events: Path, seconds: float, least: int, lighthouse: str) -> None:
    """Run one replica of torchft: it takes the state from the others, and needs no checkpoint.

    Args:
        events: file that events are appended to.
        seconds: after which the replica ends.
        least: replicas that a step needs.
        lighthouse: address of torchft's coordinator.
    """
    from datetime import timedelta

    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer, ProcessGroupGloo

    trace, ends = Trace(events), time.monotonic() + seconds
    model, batch, target = _model()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    trace.note("ready")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: _take(state, model, plain),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        min_replica_size=least,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        replica_id="replica",
    )
    optimizer = Optimizer(manager, plain)
    average = functools.partial(_average, manager, model)
    try:
        while time.monotonic() < ends:
            before = manager.current_step()
            _step(model, optimizer, batch, target, average)
            # A step in which a replica was lost, or is missing, is not made.
            if (step := manager.current_step()) != before:
                trace.step(manager.num_participants(), manager.participating_rank() or 0, step)
    finally:
        manager.shutdown()


def _average(manager: Any, model: Any) -> None:
    """Average the gradients, as one tensor, over torchft's replicas.

    torchft 0.2.0's own DistributedDataParallel fails an assertion when a peer is lost (gloo).
    """
    import torch

    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _take(state: Mapping[str, Any], model: Any, optimizer: Any) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("launcher", choices=["torchrun", "ray", "torchft"])
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--workers", type=int, nargs=2, required=True)
    parser.add_argument("--saved", type=int, default=SAVED)
    parser.add_argument("--interval", type=float)
    parser.add_argument("--lighthouse")
    given = parser.parse_args()
    if given.launcher == "torchrun":
        torchrun_rank(given.events, given.checkpoint, given.seconds, given.saved)
    elif given.launcher == "ray":
        workers = (given.workers[0], given.workers[1])
        ray_driver(given.events, given.checkpoint, given.seconds, workers, given.interval)
    else:
        torchft_replica(given.events, given.seconds, given.workers[0], given.lighthouse)


if __name__ == "__main__":
    main()
