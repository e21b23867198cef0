"""`drafthead compare`: who is fastest on this machine, and by how much against which baseline."""

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from drafthead.heads.base import Drafter
from drafthead.heads.checkpoint import load_head
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target import Target
from drafthead.infer.comparison import (
    GENERATE,
    PLAIN,
    ComparisonRow,
    Divergence,
    divergences,
    race,
    rows_of,
)
from drafthead.infer.contestants import Contestant, Ours, Transformers
from drafthead.infer.decoder import DEFAULT_CHAIN, Decoder, decoder_for, head_drafter
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.prompt_lookup import PromptLookup
from drafthead.infer.machine import describe_machine, describe_versions
from drafthead.infer.prompts import encode_one
from drafthead.scripts.comparison_report import predictions, print_report, write_report
from drafthead.train.conversations import read_conversations

LISTED_DIVERGENCES = 10


def main(
    target: Annotated[str, typer.Option(help="Target model: folder or hub id.")],
    prompts: Annotated[
        str,
        typer.Option(help="JSONL, Parquet or data set; Spec-Bench's question file as it is."),
    ],
    output: Annotated[Path, typer.Option(help="Folder for comparison.json, .md and .png.")],
    head: Annotated[list[Path] | None, typer.Option(help="Trained head; repeatable.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Separate draft model.")] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; repeatable.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most new tokens of an answer.")] = 128,
    limit: Annotated[int, typer.Option(help="Prompts to use, from the first.")] = 20,
    rounds: Annotated[int, typer.Option(help="Times that everything is decoded.")] = 3,
    tree_nodes: Annotated[
        int | None,
        typer.Option(help="Nodes of every proposal, root included; by default planned by cost."),
    ] = None,
    draft_tokens: Annotated[
        int, typer.Option(help="Most tokens that a draft model or prompt lookup drafts.")
    ] = DEFAULT_CHAIN,
    compile: Annotated[
        bool, typer.Option(help="Run compiled: minutes at the first time, then faster.")
    ] = False,
    verifier: Annotated[
        str,
        typer.Option(
            help="auto is lossless; typical and lenient are lossy and need a temperature."
        ),
    ] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampled answers.")] = 0,
) -> None:
    """Time plain decoding, transformers' generate, draft model, prompt lookup and heads.

    All decode the same prompts, taking turns. Speedup is over plain decoding on this engine,
    "over generate" over transformers' model.generate; the bound is what tau and the measured
    phases allow. On a CPU bfloat16 pays only where the processor computes in it.
    """
    if rounds < 1 or limit < 1:
        raise UserError(f"rounds and limit must be at least 1, got {rounds} and {limit}")
    loaded = Target.from_pretrained(target, dtype, device)
    build = partial(decoder_for, tree_nodes=tree_nodes, compile=compile)
    drafters = Drafters(loaded, build, head or [], draft_model, draft_tokens, dtype, device)
    ids = prompt_ids(prompts, limit, drafters.plain, max_new_tokens)
    rows: list[ComparisonRow] = []
    differing: list[Divergence] = []
    for chosen in temperature or [0.0]:
        contestants = drafters.contestants(SamplingConfig(temperature=chosen), verifier)
        total = rounds * len(ids) * len(contestants)
        with tqdm(total=total, desc=f"temperature {chosen:g}", unit="answer") as bar:
            records = race(contestants, ids, rounds, max_new_tokens, seed, bar.update)
        rows += rows_of(records, chosen, drafters.plain.end_ids)
        differing += divergences(records, ids, loaded) if chosen == 0 else []
    notes = [*predictions(rows), *divergence_notes(differing, len(ids))]
    print_report(rows, notes)
    about = {
        **describe_run(target, loaded),
        "prompts": len(ids),
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "divergences": [vars(divergence) for divergence in differing],
    }
    write_report(rows, notes, about, output)
    print(f"written: {output / 'comparison.json'}, comparison.md, comparison.png")


def describe_run(name: str, target: Target) -> dict[str, object]:
    """What a reader needs to judge the numbers, or to measure them again."""
    return {
        "command": shlex.join(["drafthead", *sys.argv[1:]]),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "target": name,
        "dtype": str(target.dtype).removeprefix("torch."),
    }


class Drafters:
    """Everything that takes part, loaded once."""

    def __init__(
        self,
        target: Target,
        build: Callable[[Target, Drafter | None], Decoder],
        heads: list[Path],
        draft_model: str | None,
        draft_tokens: int,
        dtype: str,
        device: str,
    ):
        """`target` is what transformers' own decoding runs on; `build` makes our decoders."""
        self.target, self.draft_tokens = target, draft_tokens
        self.plain = build(target, None)
        ours = self.plain.target
        self.lookup = build(ours, PromptLookup(draft_tokens))
        self.assistant = Target.from_pretrained(draft_model, dtype, device) if draft_model else None
        self.draft = (
            build(ours, DraftModel(self.assistant, ours, draft_tokens)) if self.assistant else None
        )
        self.heads = {
            folder.name: build(ours, head_drafter(load_head(folder, ours), ours))
            for folder in heads
        }

    def contestants(self, sampling: SamplingConfig, verifier: str) -> list[Contestant]:
        """The race at one temperature, baselines first."""
        found: list[Contestant] = [
            Ours(PLAIN, "none", sampling, self.plain),
            Transformers(GENERATE, "none", sampling, self.target),
        ]
        if self.assistant is not None and self.draft is not None:
            found += self._with_draft_model(self.assistant, self.draft, sampling, verifier)
        lookup = "prompt lookup"
        found.append(Ours(lookup, lookup, sampling, self.lookup, verifier=verifier))
        found += [
            Ours(f"head {name}", name, sampling, decoder, verifier=verifier)
            for name, decoder in self.heads.items()
        ]
        return found

    def _with_draft_model(
        self, assistant: Target, decoder: Decoder, sampling: SamplingConfig, verifier: str
    ) -> list[Contestant]:
        """transformers' assisted generation, with its own schedule and with ours, and our own."""
        chain, kind = self.draft_tokens, "draft model"
        theirs = "generate + assistant"
        return [
            Transformers(theirs, kind, sampling, self.target, assistant),
            Transformers(f"{theirs}, {chain}", kind, sampling, self.target, assistant, chain),
            Ours(kind, kind, sampling, decoder, verifier=verifier, is_chain=True),
        ]


def prompt_ids(source: str, limit: int, decoder: Decoder, max_new_tokens: int) -> list[list[int]]:
    """The first user turns of a source as token ids; prompts without room are left out, aloud."""
    ids = []
    for conversation in read_conversations(source, limit=limit):
        first = next((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), None)
        if first is None:
            raise UserError(f"{conversation.where} has no user message to answer")
        ids.append(encode_one(conversation.messages[: first + 1], decoder.tokenizer))
    room = decoder.max_length
    fitting = [row for row in ids if room is None or len(row) + max_new_tokens <= room]
    if left_out := len(ids) - len(fitting):
        print(f"{left_out} of {len(ids)} prompts left out: with {max_new_tokens} new tokens they "
              f"exceed the target's context of {room}")  # fmt: skip
    if not fitting:
        raise UserError(f"no prompt of {source} fits into the target's context of {room} tokens")
    return fitting


def divergence_notes(found: list[Divergence], prompts: int) -> list[str]:
    """Sentences about greedy answers that differ from plain decoding's."""
    if not found:
        return [f"greedy answers: all equal to plain decoding's on {prompts} prompts"]
    notes = [f"greedy answers: {len(found)} differ from plain decoding's; first differences:"]
    notes += [
        f"- {d.mode}, prompt {d.prompt}, token {d.position}: {d.token} instead of {d.plain_token}, "
        f"top-2 logit gap {d.top2_gap:.4f}"
        for d in sorted(found, key=lambda d: -d.top2_gap)[:LISTED_DIVERGENCES]
    ]
    return notes
