"""DeepSpeed's ZeRO on CPU ranks; it takes everything else from the environment."""

import sys

import deepspeed
import torch


def main(stage: int) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        # Its own Adam is compiled, on each node that has a compiler.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rank = engine.global_rank
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        loss = torch.nn.functional.mse_loss(engine(values), values.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        print(f"rank {rank} stage {stage} step {step} loss {loss.item():.6f}", flush=True)
    engine.save_checkpoint("checkpoints", tag="last")
    engine.load_checkpoint("checkpoints", tag="last")


if __name__ == "__main__":
    main(int(sys.argv[1]))
