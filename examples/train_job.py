"""A training job for spark-submit: arguments in, a model and an exit code out.

    hopsgpu submit examples/train_job.py --workers 4
    hopsgpu submit --deploy-mode cluster --detach examples/train_job.py --workers 4

docs/submit.md says how to use spark-submit instead. The exit code is 0 if the training returned and
the model is as good as requested.
"""

from __future__ import annotations

import argparse
import sys

import hopsgpu


def train(epochs: int, rate: float) -> dict[str, float]:
    """Fit a logistic regression to the handwritten digits that scikit-learn ships."""
    # Imported only in the ranks: a driver in YARN has no memory to spare for it.
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    ctx = hopsgpu.context()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", ctx.local_rank)
        torch.cuda.set_device(device)
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32, device=device)
    labels = torch.tensor(digits.target, device=device)
    tested = torch.arange(len(images), device=device) % 5 == 0
    own = (~tested).nonzero().flatten()
    own = own[ctx.rank : len(own) - len(own) % ctx.world_size : ctx.world_size]
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    accuracy = 0.0
    for epoch in range(epochs):
        for batch in own[torch.randperm(len(own), device=device)].split(32):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            right = model.module(images[tested]).argmax(1) == labels[tested]
        accuracy = float(right.float().mean())
        ctx.report(epoch, accuracy=accuracy)
        if ctx.rank == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")  # `hopsgpu logs last` shows it
    if ctx.rank == 0:
        torch.save(model.module.cpu().state_dict(), ctx.model_dir / "digits.pt")
    dist.destroy_process_group()
    return {"accuracy": accuracy}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="ranks, with a GPU each")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rate", type=float, default=0.01, help="of learning")
    parser.add_argument("--model", default="digits", help="name of the model on the lake")
    parser.add_argument("--least", type=float, default=0.9, help="accuracy that is a success")
    # Nobody waits at a screen for a job: in a busy cluster its turn may take hours.
    parser.add_argument("--wait", default="12h", help="for the GPUs, as 10m or 12h")
    given = parser.parse_args()

    spark = hopsgpu.session("train-job")
    try:
        result = hopsgpu.launch(
            train,
            kwargs={"epochs": given.epochs, "rate": given.rate},
            workers=given.workers,
            model=given.model,
            acquire_timeout=given.wait,
        )
    finally:
        spark.stop()
    reached = result.value["accuracy"]
    print(f"accuracy {reached:.4f}, model {result.model.url if result.model else 'none'}")
    return 0 if reached >= given.least else 1


if __name__ == "__main__":
    sys.exit(main())
