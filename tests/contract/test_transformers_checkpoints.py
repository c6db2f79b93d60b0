"""Hugging Face's Trainer resumes from what all ranks have saved, also with save_on_each_node."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hopsgpu.rank.context import Context
from tests.contract.framework_ranks import local_gang, results

pytestmark = pytest.mark.soak


def context_of(home: str, attempt: int) -> Context:
    """The context of this process, whose checkpoints are below `home`."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    urls = f"file://{home}/checkpoints", f"file://{home}/logs"
    return Context(
        rank, 0, world_size, "node", (), "worker", "run", attempt, Path(home, "model"), *urls
    )


def train(home: str, output: str, attempt: int, steps: int, each_node: bool) -> dict[str, Any]:
    """Train as a rank of an attempt does whose checkpoints are below `home`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from hopsgpu.frameworks.transformers import gang_callback

    # Agents set it for ranks without a GPU.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    rank = int(os.environ["RANK"])
    gang = context_of(home, attempt)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=50, intermediate_size=16, **sizes)
    rows = [
        {"input_ids": [n % 50, n % 7], "attention_mask": [1, 1], "labels": n % 2} for n in range(64)
    ]
    trainer = Trainer(
        BertForSequenceClassification(config),
        TrainingArguments(
            output.format(attempt=attempt, rank=rank),
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=2,
            lr_scheduler_type="constant",
            save_on_each_node=each_node,
            save_total_limit=1,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        callbacks=[gang_callback(gang)],
    )
    found = gang.latest_checkpoint(all_ranks=True)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    weights = sum(p.detach().double().abs().sum().item() for p in trainer.model.parameters())
    files = [] if found is None else sorted(path.name for path in found.iterdir())
    return {"files": files, "step": trainer.state.global_step, "weights": round(weights, 6)}


def run(
    home: Path, output: str, containers: int, attempt: int, steps: int, *, each_node: bool
) -> list[dict[str, Any]]:
    world = local_gang(containers, 2 // containers)
    return results(
        world,
        Path(__file__),
        "train",
        home=str(home),
        output=f"{home}/{output}",
        attempt=attempt,
        steps=steps,
        each_node=each_node,
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> float:
    """The sum of the weights after a training that was not interrupted."""
    whole = run(tmp_path_factory.mktemp("whole"), "{rank}", 1, 0, 6, each_node=False)
    return float(whole[0]["weights"])


@pytest.mark.parametrize(
    ("output", "containers", "each_node"),
    [
        ("out-{attempt}/{rank}", 1, False),
        ("out-{attempt}/{rank}", 1, True),
        ("out-{attempt}/{rank}", 2, False),
        ("out-{attempt}/{rank}", 2, True),
        # All ranks write to one directory.
        ("out-{attempt}", 1, False),
    ],
)
def test_a_second_attempt_resumes(
    tmp_path: Path, weights: float, output: str, containers: int, each_node: bool
) -> None:
    run(tmp_path, output, containers, 0, 4, each_node=each_node)
    for rank in run(tmp_path, output, containers, 1, 6, each_node=each_node):
        assert rank["step"] == 6
        assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= set(rank["files"])
        assert rank["weights"] == weights


def save_shards(home: str) -> list[str]:
    """Save as FSDP does on two nodes, each of which has the files of all ranks; needs no GPU."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, DistributedType

    from hopsgpu.frameworks.transformers import gang_callback

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    files = {
        "trainer_state.json": f"of rank {rank}",
        f"rng_state_{rank}.pth": "",
        f"pytorch_model_fsdp_0/__{rank}_0.distcp": f"of rank {rank}",
        **({} if rank else {"pytorch_model_fsdp_0/.metadata": ""}),
    }
    for name, text in files.items():
        file = Path(home, str(rank), "checkpoint-3", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    gang = context_of(home, 0)
    args = SimpleNamespace(output_dir=f"{home}/{rank}", process_index=rank, world_size=2)
    gang_callback(gang).on_save(args, SimpleNamespace(global_step=3), None)
    dist.barrier()
    found = gang.latest_checkpoint(all_ranks=True)
    assert found is not None and (found / "trainer_state.json").read_text() == "of rank 0"
    return sorted(str(path.relative_to(found)) for path in found.rglob("*") if path.is_file())


def test_shards_of_all_ranks_are_found(tmp_path: Path) -> None:
    shards = [f"pytorch_model_fsdp_0/{name}" for name in (".metadata", "__0_0.distcp")]
    states = ["rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"]
    expected = [*shards, "pytorch_model_fsdp_0/__1_0.distcp", *states]
    found = results(local_gang(2), Path(__file__), "save_shards", home=str(tmp_path))
    assert found == [expected, expected]
