"""An elastic gang with PyTorch's DDP: two or three workers, as many as there are free GPUs.

A GPU that becomes free joins at the next checkpoint, and one that is lost leaves. Each time all
ranks start anew from the latest checkpoint, and `context().data` has the rows of the epoch that are
not trained yet. The batch of the whole gang stays the same, so the learning rate does too.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/elastic_ddp.py
"""

from __future__ import annotations

from typing import Any

import hopsgpu

WORKERS = (2, 3)
BATCH = 96  # of all ranks together: a multiple of each number of ranks


def train(epochs: int) -> dict[str, Any]:
    """Fit a plane; return the weights, and the number of ranks that the last world had."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    ctx = hopsgpu.context()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ctx.local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(3, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-4, momentum=0.9)

    step = 0
    found = ctx.latest_checkpoint()
    if found is not None:
        state = torch.load(found, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    data = ctx.data
    for epoch in range(data.epoch, epochs):
        own = BATCH // ctx.world_size
        for batch in data.batches(own, shuffle=True, epoch=epoch, shapes={"x": (3,)}):
            x = torch.tensor(batch["x"], device=device)
            y = torch.tensor(batch["y"], device=device)
            loss = torch.nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()  # DDP averages the gradients over all ranks
            optimizer.step()
            step += 1
            # Every rank asks; one saves, because all have the same state.
            if (ctx.should_checkpoint(step) or step % 100 == 0) and ctx.rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "step": step}, "state.pt")
                ctx.save_checkpoint("state.pt", step)
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            ctx.report(step, loss=mean / ctx.world_size)
    weights = model.module.weight[0].tolist()
    dist.destroy_process_group()
    return {"weights": weights, "steps": step, "ranks": ctx.world_size}


def points(spark: Any) -> Any:
    """Return a DataFrame of noisy points on a plane."""
    from pyspark.sql import functions as F

    x = [F.randn(seed) for seed in range(3)]
    table = spark.range(9600, numPartitions=4).select(*(c.alias(f"x{n}") for n, c in enumerate(x)))
    y = F.col("x0") - 2 * F.col("x1") + 3 * F.col("x2") + 0.5 * F.randn(3)
    return table.select(
        F.array("x0", "x1", "x2").cast("array<float>").alias("x"), y.cast("float").alias("y")
    )


def main() -> None:
    spark = hopsgpu.session("elastic-ddp")
    result = hopsgpu.launch(train, kwargs={"epochs": 10}, workers=WORKERS, data=points(spark))
    spark.stop()
    for world in result.worlds:
        print(f"world {world.generation}: {world.ranks} ranks, {world.end} {world.why}")
    print(f"plane {result.value['weights']} after {result.value['steps']} steps")


if __name__ == "__main__":
    main()
