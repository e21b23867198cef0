"""Training runs: a small target with conversations on the disk, a run's YAML, and the run."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from tiny import write_conversations, write_target

from drafthead.train.data.sequences import (
    COLUMNS,
    SupervisedTokens,
    TokenSequence,
    TokenTable,
    add_to_digest,
    columns_of,
)
from drafthead.train.run.config import load_run_config
from drafthead.train.train_heads import train

Settings = dict[str, Any]


def write_inputs(folder: Path, **target: object) -> None:
    """A target, 40 conversations to learn from, and 8 to measure on."""
    write_target(folder / "target", max_position_embeddings=128, **target)
    write_conversations(folder / "train.jsonl", 40, seed=0)
    write_conversations(folder / "validation.jsonl", 8, seed=1)


def write_run(path: Path, inputs: Path, head: Settings, optimizer: Settings, run: Settings) -> Path:
    """The configuration of a run, which writes beside `path`, without its suffix."""
    limits = {"epochs", "max_steps", "max_minutes"} & set(run)
    content = {
        "target": {"name": str(inputs / "target")},
        "head": head,
        "data": {
            "train": str(inputs / "train.jsonl"),
            "validation": str(inputs / "validation.jsonl"),
            "max_length": 64,
        },
        "optimizer": {"name": "muon", "lr": 3e-3} | optimizer,
        "train": {
            "output": str(path.with_suffix("")),
            "batch_rows": 4,
            "micro_batch_rows": 2,
            "cpu": True,
        }
        | ({} if limits else {"max_steps": 12})
        | run,
    }
    path.write_text(yaml.safe_dump(content))
    return path


def run(config: Path, *overrides: str) -> Path:
    """Train in this process; gives the output folder."""
    loaded = load_run_config(config, overrides)
    assert train(loaded)
    return Path(loaded.train.output)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """What a run has measured on held-out answers, without the seconds that it took until then."""
    records = [json.loads(line) for line in (folder / "evaluation.jsonl").open()]
    return [{name: found for name, found in r.items() if name != "seconds"} for r in records]


def in_memory(sequences: Iterable[TokenSequence]) -> TokenTable:
    """A table of some sequences."""
    parts = [SupervisedTokens(s.input_ids.tolist(), s.supervised.tolist()) for s in sequences]
    columns, digest = columns_of(parts, [None] * len(parts)), hashlib.sha256()
    add_to_digest(digest, columns)
    return TokenTable(Dataset.from_dict(columns, COLUMNS), digest.hexdigest())
