"""Hugging Face's Trainer, with arguments from the command line, a YAML or a JSON file."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "a text file"})


class Lines(torch.utils.data.Dataset):
    def __init__(self, file: str) -> None:
        lines = Path(file).read_text().splitlines()
        self._rows = [[ord(letter) % 64 for letter in line.ljust(12)[:12]] for line in lines]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.tensor(self._rows[index])
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    first = sys.argv[1]
    if first.endswith(".json"):
        data, training = parser.parse_json_file(first)
    elif first.endswith(".yaml"):
        data, training = parser.parse_yaml_file(first)
    else:
        data, training = parser.parse_args_into_dataclasses()
    set_seed(training.seed)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    trainer = Trainer(GPT2LMHeadModel(config), training, train_dataset=Lines(data.train_file))
    result = trainer.train()
    trainer.save_model()
    if training.process_index == 0:
        files = sorted(path.name for path in Path(training.output_dir).glob("model*"))
        print(f"{training.world_size} ranks loss {result.training_loss:.5f} {files}", flush=True)


if __name__ == "__main__":
    main()
