"""A sharded model that is killed and resumes: torch.distributed.checkpoint on a gang.

Every rank holds a part of the model (tensor parallel) and saves it. Loading needs all parts in one
directory: `latest_checkpoint(all_ranks=True)`.

    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/checkpoint_torch.py
"""

from __future__ import annotations

import os
import shutil
import signal

import hopsgpu

WORKERS = 2
STEPS = 6


def train(steps: int, die_at: int | None = None) -> float:
    """Return the loss after some steps; if `die_at` is given, rank 1 is killed there once."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    ctx = hopsgpu.context()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    first = 0
    found = ctx.latest_checkpoint(all_ranks=True)
    if found is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=found)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = state["step"] + 1
        print(f"resumes at step {first}")

    loss = torch.tensor(0.0)
    for step in range(first, steps):
        if step == die_at and ctx.attempt == 0:
            dist.barrier()  # all have saved the previous step, so it is complete
            if ctx.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weights, moments = get_state_dict(model, optimizer)
        # Each rank writes its own files, in its own working directory.
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(state, checkpoint_id="state")
        # Once it returns there is a copy, which is uploaded while training continues.
        ctx.save_checkpoint("state", step)
        shutil.rmtree("state")
    dist.destroy_process_group()
    return float(loss.detach())


def main() -> None:
    spark = hopsgpu.session("checkpoint-torch")
    cpus = {"workers": WORKERS, "gpus_per_worker": 0}
    whole = hopsgpu.launch(train, args=(STEPS,), **cpus)
    # Killed at step 4; the next attempt resumes.
    killed = hopsgpu.launch(train, args=(STEPS, 4), retries=1, **cpus)
    # Half of the steps; a later launch does the rest.
    half = hopsgpu.launch(train, args=(STEPS // 2,), **cpus)
    resumed = hopsgpu.launch(train, args=(STEPS,), resume=half.run_id, **cpus)
    spark.stop()
    print(f"loss {whole.value:.6f}, killed {killed.value:.6f}, resumed {resumed.value:.6f}")


if __name__ == "__main__":
    main()
