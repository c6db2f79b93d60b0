"""FSDP2, tensor and pipeline parallelism, and distributed checkpoints, as a script has them."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 16)
        self.last = torch.nn.Linear(16, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(values)))


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    mesh = init_device_mesh("cpu", (size,))
    sharded = seeded()
    for module in (sharded.first, sharded.last, sharded):
        fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), 1e-2)
    place = Path("checkpoints")
    saved = sorted(int(path.parent.name) for path in place.glob("*/.metadata"))
    if saved:
        model, state = get_state_dict(sharded, optimizer)
        dcp.load({"model": model, "optimizer": state}, checkpoint_id=place / str(saved[-1]))
        set_state_dict(sharded, optimizer, model_state_dict=model, optim_state_dict=state)
        print(f"rank {rank} continues after step {saved[-1]}", flush=True)
    for step in range(saved[-1] + 1 if saved else 0, steps):
        loss = sharded(values).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"rank {rank} sharded {step} loss {loss.item():.6f}", flush=True)
        model, state = get_state_dict(sharded, optimizer)
        dcp.save({"model": model, "optimizer": state}, checkpoint_id=place / str(step))

    plan = {"first": ColwiseParallel(), "last": RowwiseParallel()}
    split = parallelize_module(seeded(), mesh, plan)
    loss = split(values).pow(2).mean()
    print(f"rank {rank} tensor parallel loss {loss.item():.6f}", flush=True)

    stages = pipeline(seeded(), mb_args=(values[:2],), split_spec={"last": SplitPoint.BEGINNING})
    stage = stages.build_stage(rank, device=torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
    if rank == 0:
        schedule.step(values)
    else:
        losses: list[torch.Tensor] = []
        schedule.step(target=torch.zeros(4, 8), losses=losses)
        print(f"rank {rank} pipeline loss {sum(losses).item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
