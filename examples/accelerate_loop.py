"""A custom training loop with Hugging Face Accelerate on a gang; the loop does not use hopsgpu.

pip install 'hopsgpu[libraries]'
eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
python examples/accelerate_loop.py
"""

from __future__ import annotations

from typing import Any

import hopsgpu

WORKERS = 2


def train(epochs: int) -> dict[str, Any]:
    """Return the loss of each epoch over all ranks, and the fitted plane."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    x = torch.randn(512, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [3.0]])
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    # Each rank gets its part of the rows.
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for epoch in range(epochs):
        total = torch.zeros((), device=accelerator.device)
        for inputs, wanted in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        losses.append(float(accelerator.reduce(total, "mean")) / len(loader))
        hopsgpu.context().report(epoch, loss=losses[-1])
    plane = accelerator.unwrap_model(model)
    accelerator.save_model(plane, hopsgpu.context().model_dir)  # rank 0 writes
    return {
        "losses": losses,
        "weights": plane.weight.flatten().tolist(),
        "world": accelerator.num_processes,
        "steps": len(loader),
    }


def main() -> None:
    spark = hopsgpu.session("accelerate")
    result = hopsgpu.launch(train, kwargs={"epochs": 5}, workers=WORKERS, model="plane")
    spark.stop()
    print(f"loss {result.value['losses'][0]:.4f} -> {result.value['losses'][-1]:.4f}")
    print(f"plane {result.value['weights']}, {result.model.url}")


if __name__ == "__main__":
    main()
