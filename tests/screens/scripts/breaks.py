"""A training whose rank 1 fails."""

import time

import hopsgpu


def train():
    ctx = hopsgpu.context()
    print("reading the batches", flush=True)
    if ctx.rank == 1:
        raise ValueError("bad batch: 31 labels for 32 images")
    time.sleep(600)


hopsgpu.session("breaks")
hopsgpu.launch(train, workers=3, name="breaks")
