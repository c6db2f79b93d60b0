"""A training of a few seconds that reports a loss and an accuracy, and leaves a model."""

import argparse
import math
import time

import hopsgpu


def train(steps, rate, seconds):
    ctx = hopsgpu.context()
    loss = 0.0
    for step in range(steps):
        loss = 2.3 * math.exp(-rate * step) + 0.05 * math.cos(3 * step + ctx.rank)
        ctx.report(step, loss=loss, accuracy=1 - loss / 2.4)
        if step % 10 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
        time.sleep(seconds)
    if ctx.rank == 0:
        (ctx.model_dir / "weights.txt").write_text(f"{loss}\n")
    return round(1 - loss / 2.4, 4)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=0.08)
    parser.add_argument("--seconds", type=float, default=0.1)
    args = parser.parse_args()
    hopsgpu.session("digits")
    settings = {"steps": args.steps, "rate": args.rate, "seconds": args.seconds}
    result = hopsgpu.launch(
        train, kwargs=settings, workers=args.workers, name="digits", model="digits"
    )
    print(result.model.url)


if __name__ == "__main__":
    main()
