"""Fine-tuning with Hugging Face's Trainer on a gang: what runs under torchrun runs here.

The model is created from a config, so that nothing is downloaded; yours would use
`from_pretrained`.

    pip install 'hopsgpu[libraries]'
    eval "$(hopsgpu cluster env)"          # or your own cluster's HADOOP_CONF_DIR
    python examples/transformers_trainer.py
"""

from __future__ import annotations

import random
from typing import Any

import hopsgpu

WORKERS = 2
VOCABULARY, LENGTH, WANTED = 32, 10, 5


def sentences(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tokens, with the label whether one of them is WANTED."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        tokens = [draw.randrange(WANTED + 1, VOCABULARY) for _ in range(LENGTH)]
        label = draw.randrange(2)
        if label:
            tokens[draw.randrange(LENGTH)] = WANTED
        rows.append({"input_ids": tokens, "attention_mask": [1] * LENGTH, "labels": label})
    return rows


def train(epochs: int) -> dict[str, float]:
    """Return the last evaluation, and how the loss fell."""
    import numpy as np
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        Trainer,
        TrainingArguments,
    )

    from hopsgpu.frameworks.transformers import gang_callback

    ctx = hopsgpu.context()
    callbacks = [gang_callback(ctx)]  # metrics to the driver, checkpoints to the lake
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    trainer = Trainer(
        model_init=lambda: BertForSequenceClassification(config),
        args=TrainingArguments(
            "checkpoints",  # below the rank's working directory
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=8,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=sentences(512, seed=0),
        eval_dataset=sentences(128, seed=1),
        compute_metrics=lambda p: {"accuracy": float(np.mean(p[0].argmax(-1) == p[1]))},
        callbacks=callbacks,
    )
    found = ctx.latest_checkpoint(all_ranks=True)  # None if nothing was saved before
    trainer.train(resume_from_checkpoint=found)
    trainer.save_model(ctx.model_dir)  # rank 0 writes
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = float(sum(p.detach().abs().sum() for p in trainer.model.parameters()))
    losses = {"first": logged[0], "last": logged[-1]}
    return {**losses, "weights": weights, "resumed": found is not None, **trainer.evaluate()}


def main() -> None:
    spark = hopsgpu.session("transformers-trainer")
    result = hopsgpu.launch(
        train, kwargs={"epochs": 4}, workers=WORKERS, model="sentences", retries=1
    )
    spark.stop()
    print(f"loss {result.value['first']:.3f} -> {result.value['last']:.3f}")
    print(f"accuracy {result.value['eval_accuracy']:.3f}, {result.model.url}")


if __name__ == "__main__":
    main()
