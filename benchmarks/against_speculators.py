"""Our trainer beside that of speculators: `python benchmarks/against_speculators.py --help`.

Both train an EAGLE-3 head of one layer on the same answers, as the same token ids, as often, with
as many tokens in a step. speculators reads hidden states that a server of vLLM has written; here
the target writes them in the same files, in this process. Its heads are imported, draft as deep as
ours, and are measured as ours are. Seconds are of processor time.
"""

import json
import os
import random
import resource
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import torch
import typer
from datasets import load_from_disk
from recorded import write_record
from safetensors.torch import save_file
from tqdm import tqdm

from drafthead.core.storage.files import write_text
from drafthead.core.target.any_target import load_decoder_only
from drafthead.core.target.features import FeatureSpec
from drafthead.core.target.target import Target
from drafthead.lab.diagnosis.examination import ROW
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.train.data.fitted_rows import Reading
from drafthead.train.data.token_table import token_table

HERE = os.path.relpath(Path(__file__).parent)  # commands are recorded
DEPTH = 5  # tokens that all heads draft
# What makes the runs alike, 1,024 tokens in a step and a draft vocabulary of 8,192, and what a
# processor needs. All else is the default of `speculators train` and of `configs/eagle3.yaml`.
THEIRS = (
    "--speculator-type eagle3 --total-seq-len 1024 --draft-vocab-size 8192 --on-missing raise "
    "--draft-attn-impl sdpa --loss-implementation eager --num-workers 0"
)
OURS = (
    "data.max_length=1024 train.batch_rows=1 train.micro_batch_rows=1 head.draft_vocab_size=8192 "
    "data.validation_share=null train.curve=false"
)


def timed(command: list[str]) -> int:
    """Run a command to its end; the seconds of processor time that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def called(verb: str, options: str) -> int:
    """Call a verb of ours; the seconds of processor time that it took."""
    return timed([sys.executable, "-m", "drafthead.scripts.cli", verb, *shlex.split(options)])


def divide(answers: Path, folder: Path, learnt: int, held_out: int) -> None:
    """Write greedy answers to learn from, and others: each prompt has one greedy answer."""
    table = pq.read_table(answers)
    greedy = [row for row, t in enumerate(table["temperature"].to_pylist()) if t == 0]
    chosen = table.take(random.Random(0).sample(greedy, learnt + held_out))
    pq.write_table(chosen.slice(0, learnt), folder / "learnt.parquet")
    pq.write_table(chosen.slice(learnt), folder / "held_out.parquet")


def prepare(name: str, folder: Path, python: str) -> dict[str, Any]:
    """Write what the other trainer reads; the numbers of tokens, and how long states took."""
    target = load_decoder_only(name, "bfloat16")
    assert target.tokenizer is not None
    for part in (target.model, target.tokenizer):
        part.save_pretrained(folder / "target")
    rows = token_table(Reading(f"{folder}/learnt.parquet", None, ROW, None), target.tokenizer)
    lines = [
        json.dumps({"input_ids": r.input_ids.tolist(), "loss_mask": r.supervised.int().tolist()})
        for r in rows
    ]
    write_text(folder / "rows.jsonl", "\n".join(lines) + "\n")
    theirs = f"{python} -m speculators prepare-data --model {folder}/target --no-skip-token-freq "
    files = f"--data {folder}/rows.jsonl --output {folder}/rows --num-preprocessing-workers 1"
    timed(shlex.split(theirs + files))
    before = time.process_time()
    write_states(target, folder / "rows")
    found = {"answers": len(rows), "tokens": int(rows.lengths.sum())}
    found["supervised_tokens"] = int(rows.num_supervised.sum())
    return found | {"seconds_of_hidden_states": round(time.process_time() - before)}


@torch.inference_mode()
def write_states(target: Target, prepared: Path) -> None:
    """The hidden states of each prepared row, as a server of vLLM writes them.

    Of layers 2, L/2 and L - 3 the input, and the output of the last one before the final norm.
    """
    count = target.num_layers
    layers = FeatureSpec((1, count // 2 - 1, count - 4, count - 1), last=False)
    folder = prepared / "hidden_states"
    folder.mkdir(exist_ok=True)
    for index, row in enumerate(tqdm(load_from_disk(str(prepared)), desc="hidden states")):
        ids = torch.as_tensor(row["input_ids"])
        taps = target.read(ids[None], torch.arange(len(ids))[None], None, layers).taps
        states = torch.stack([tap[0] for tap in taps], dim=1).bfloat16()
        tensors = {"hidden_states": states.contiguous(), "token_ids": ids.long()}
        save_file(tensors, folder / f"hs_{index}.safetensors")


def train_theirs(head: Path, options: str, epochs: int, python: str) -> dict[str, Any]:
    """Train with speculators and import the head."""
    folder, files = head.parent, head.with_name(f"{head.name}-checkpoints")
    share = 1 - 1 / load_from_disk(f"{folder}/rows").num_rows  # it insists on a row to validate on
    command = (
        f"{python} {HERE}/workers/speculators_trainer.py {THEIRS} --epochs {epochs} "
        f"--verifier-name-or-path {folder}/target --data-path {folder}/rows --save-path {files} "
        f"--train-data-ratio {share} {options}"
    )
    seconds, last = timed(shlex.split(command)), files / str(epochs - 1)
    config = json.loads((last / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = DEPTH
    write_text(last / "config.json", json.dumps(config, indent=2))
    called("head", f"import {last} --target {folder}/target --output {head}")
    found = {"speculators": config["speculators_version"], "command": command}
    steps = json.loads((last / "training_state.json").read_text())["global_step"]
    return found | {"seconds": seconds, "steps": steps}


def train_ours(head: Path, options: str, epochs: int) -> dict[str, Any]:
    """Train with `drafthead train`, in whose first epoch the target computes hidden states."""
    settings = (
        f"--config {HERE}/../configs/eagle3.yaml {OURS} target.name={head.parent}/target "
        f"data.train={head.parent}/learnt.parquet data.feature_folder={head}-features "
        f"train.epochs={epochs} train.output={head} head.depth={DEPTH} {options}"
    )
    seconds = called("train", settings)
    log = [json.loads(line) for line in (head / "metrics.jsonl").read_text().splitlines()]
    about = {"command": f"drafthead train {settings}", "seconds": seconds, "steps": len(log)}
    share = sum(step["target_share"] for step in log) / len(log)
    return about | {"seconds_of_hidden_states": round(share * seconds)}


def measure(head: Path) -> dict[str, Any]:
    """What `head evaluate` finds on the answers held out."""
    folder, file = head.parent, head.with_name(f"{head.name}-evaluation.json")
    how = f"evaluate {head} --target {folder}/target --data {folder}/held_out.parquet"
    called("head", f"{how} --output {file} --save-acceptance")
    (found,) = json.loads(file.read_text())["data"].values()
    return {key: found[key] for key in ("anchors", "top1", "tau_chain", "tau_tree")}


def show(runs: dict[str, dict[str, Any]]) -> None:
    """A table of all heads."""
    columns = ["head", "steps", "seconds", "chain", "16 nodes"]
    rows = []
    for name, run in runs.items():
        tau = number(run["tau_chain"]), number(run["tau_tree"]["16"])
        rows.append([name, str(run["steps"]), str(run["seconds"]), *tau])
    print_table(Table("tau on answers held out", columns, rows))


def main(
    target: Annotated[str, typer.Option(help="Model: folder, GGUF file or hub id.")],
    answers: Annotated[Path, typer.Option(help="Parquet file of the target's answers.")],
    python: Annotated[str, typer.Option(help="Python of an environment with speculators.")],
    folder: Annotated[Path, typer.Option(help="For data and heads; finished runs stay.")],
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    theirs: Annotated[list[str], typer.Option(help="A run: NAME=OPTIONS of its trainer.")],
    ours: Annotated[list[str], typer.Option(help="A run: NAME=SETTINGS of our trainer.")],
    learnt: Annotated[int, typer.Option(help="Answers to learn from.")] = 200,
    held_out: Annotated[int, typer.Option(help="Answers to measure on.")] = 60,
    epochs: Annotated[int, typer.Option(help="How often each is read.")] = 3,
) -> None:
    """Train with both trainers, and measure the heads on answers held out."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.json"
    if not data.exists():
        divide(answers, folder, learnt, held_out)
        write_text(data, json.dumps(prepare(target, folder, python)))
    runs = {}
    for given in (*theirs, *ours):
        name, _, options = given.partition("=")
        head, result = folder / name, folder / f"{name}.json"
        if not result.exists():
            train = partial(train_theirs, python=python) if given in theirs else train_ours
            write_text(result, json.dumps(train(head, options, epochs) | measure(head)))
        runs[name] = json.loads(result.read_text())
    show(runs)
    counts = json.loads(data.read_text()) | {"epochs": epochs, "held_out": held_out}
    write_record(output, {"data": counts, "runs": runs})


if __name__ == "__main__":
    typer.run(main)
