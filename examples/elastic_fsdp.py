"""An elastic gang with FSDP2: the shards of two ranks become those of three, and back.

Every rank holds a part of the model and of the optimizer's state, and saves it. When the number of
ranks changes, `latest_checkpoint(all_ranks=True)` brings all parts together, and
torch.distributed.checkpoint reads from them what each rank of the new world holds.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/elastic_fsdp.py
"""

from __future__ import annotations

import shutil
from typing import Any

import hopsgpu

WORKERS = (2, 3)
BATCH = 96  # of all ranks together: a multiple of each number of ranks


def train(steps: int) -> dict[str, Any]:
    """Fit a small network; return the last loss, and the number of ranks that the world had."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ctx = hopsgpu.context()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ctx.local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (ctx.world_size,))
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers).to(device)
    for layer in (layers[0], layers[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def state(step: int) -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "step": step}

    first = 0
    found = ctx.latest_checkpoint(all_ranks=True)
    if found is not None:
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=found)
        weights, moments = loaded["model"], loaded["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = loaded["step"] + 1

    mean = torch.zeros(())
    for step in range(first, steps):
        # The step determines the batch of the whole gang, of which each rank takes its part.
        x = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step)).to(device)
        own = x.chunk(ctx.world_size)[ctx.rank]
        loss = torch.nn.functional.mse_loss(model(own), own.sin().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # FSDP averages the gradients over all ranks
        optimizer.step()
        if ctx.should_checkpoint(step) or step % 100 == 99:
            # Each rank writes its own files, in its own working directory.
            dcp.save(state(step), checkpoint_id="state")
            ctx.save_checkpoint("state", step)
            shutil.rmtree("state")
        mean = loss.detach() / ctx.world_size
        dist.all_reduce(mean)
        ctx.report(step, loss=mean)
    dist.destroy_process_group()
    return {"loss": float(mean), "ranks": ctx.world_size}


def main() -> None:
    spark = hopsgpu.session("elastic-fsdp")
    result = hopsgpu.launch(train, kwargs={"steps": 1000}, workers=WORKERS)
    spark.stop()
    for world in result.worlds:
        print(f"world {world.generation}: {world.ranks} ranks, {world.end} {world.why}")
    print(f"loss {result.value['loss']:.6f}")


if __name__ == "__main__":
    main()
