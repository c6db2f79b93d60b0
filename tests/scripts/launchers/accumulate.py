"""Gradient accumulation with accelerate, by the environment or by a configuration file."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.commands.config import load_config_from_file
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    args = parser.parse_args()
    precision = None
    if args.config:
        precision = load_config_from_file(args.config).mixed_precision
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=precision)
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    values = torch.randn(32, 4)
    rows = TensorDataset(values, values.sum(1, keepdim=True))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 4))
    for epoch in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
        ranks, mixed = accelerator.num_processes, accelerator.mixed_precision
        accelerator.print(f"{ranks} ranks {mixed} epoch {epoch} loss {mean:.5f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
