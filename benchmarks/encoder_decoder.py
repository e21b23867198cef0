"""Table 2 of Leviathan et al. (2023, arXiv 2211.17192) as a toy: `encoder_decoder.py --help`.

A T5 of four and four layers and a draft model of one and one are trained here, in minutes, to spell
numbers: `407` becomes `four null seven`, each digit in English or, more seldom, in German. So there
is something to draw at temperature 1. A toy says how much is accepted, and that answers stay the
target's; what a draft model gains on real translations and summaries it does not say.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from recorded import write_record
from tqdm import trange
from transformers import T5Config, T5ForConditionalGeneration

from drafthead.core.target.any_target import target_of
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.answers.results import summed
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine.stats import DecodeStats
from drafthead.lab.reports.report import Table, number, print_table
from drafthead.lab.speedup_model import chain_speedup, predict_chain

ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["null", "eins", "zwei", "drei", "vier", "fuenf", "sechs", "sieben", "acht", "neun"]
GERMAN_SHARE = 0.2
PAD, END, FIRST = 0, 1, 2  # the decoder begins with PAD, as T5's does
SIGNS = "0123456789 abcdefghijklmnopqrstuvwxyz"
DIGITS = (2, 6)  # of a number
BATCH = 32
LIMIT = 64  # tokens of an answer


@dataclass(frozen=True)
class Size:
    """Layers of the encoder and as many of the decoder, and their width."""

    layers: int
    width: int


TARGET, DRAFT = Size(4, 64), Size(1, 32)


def encoded(text: str) -> list[int]:
    """One token a sign, and the end."""
    return [FIRST + SIGNS.index(sign) for sign in text] + [END]


def example(generator: torch.Generator) -> tuple[list[int], list[int]]:
    """A number and one way to spell it."""
    count = int(torch.randint(DIGITS[0], DIGITS[1] + 1, (1,), generator=generator))
    digits = torch.randint(10, (count,), generator=generator).tolist()
    german = (torch.rand(count, generator=generator) < GERMAN_SHARE).tolist()
    pairs = zip(digits, german, strict=True)
    words = [(GERMAN if is_german else ENGLISH)[digit] for digit, is_german in pairs]
    return encoded("".join(map(str, digits))), encoded(" ".join(words))


def padded(rows: list[list[int]], fill: int) -> torch.Tensor:
    """Rows as [B, T], filled up on the right."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def trained(size: Size, steps: int, seed: int, name: str) -> Target:
    """A model that has learnt from `steps` batches of examples."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=FIRST + len(SIGNS), d_model=size.width, d_kv=size.width // 4, num_heads=4,
        d_ff=4 * size.width, num_layers=size.layers, num_decoder_layers=size.layers,
        dropout_rate=0.0, decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=END,
    )  # fmt: skip
    model, generator = T5ForConditionalGeneration(config), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    with trange(steps, desc=f"training the {name}") as bar:
        for _ in bar:
            sources, answers = zip(*(example(generator) for _ in range(BATCH)), strict=True)
            ids, labels = padded([*sources], PAD), padded([*answers], -100)
            loss = model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return target_of(model)


@dataclass(frozen=True)
class Answers:
    """Numbers that were spelled one by one."""

    sequences: list[list[int]]
    stats: DecodeStats


def answers(decoder: Decoder, sources: list[list[int]], seed: int, **options: object) -> Answers:
    """The answer to each source, with a seed of its own."""
    results = [
        decoder.generate(source, seed=seed + row, max_new_tokens=LIMIT, **options)
        for row, source in enumerate(sources)
    ]
    stats = summed(result.stats for result in results)
    return Answers([result.sequences[0] for result in results], stats)


def measured(found: Answers, length: int, plain: Answers) -> dict[str, float]:
    """What came of chains of `length` drafted tokens.

    `expected` is (1 - alpha^(K+1)) / (1 - alpha), Leviathan's equation 1; tau is what was measured;
    `equal` is the share of answers that are those of plain decoding.
    """
    lengths = [n for row in found.stats.accept_lengths for n in row]
    alpha = predict_chain(lengths, length, cost=0.0).alpha
    pairs = [*zip(found.sequences, plain.sequences, strict=True)]
    return {
        "alpha": alpha,
        "expected": chain_speedup(alpha, length, cost=0.0),
        "tau": found.stats.tau,
        "over plain": found.stats.tokens_per_second / plain.stats.tokens_per_second,
        "equal": sum(one == other for one, other in pairs) / len(pairs),
    }


def main(
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    steps: Annotated[int, typer.Option(help="Batches that each model learns from.")] = 800,
    draft_tokens: Annotated[int, typer.Option(help="Tokens of a chain, K.")] = 5,
    prompts: Annotated[int, typer.Option(help="Numbers that are spelled, one by one.")] = 40,
    seed: Annotated[int, typer.Option(help="Of models, examples and answers.")] = 0,
) -> None:
    """Train the pair, then spell other numbers plainly and with each drafter, at T = 0 and 1."""
    target = trained(TARGET, steps, seed, "target")
    draft = trained(DRAFT, steps, seed + 1, "draft model")
    generator = torch.Generator().manual_seed(seed + 2)
    sources = [example(generator)[0] for _ in range(prompts)]
    drafters = {
        "draft model": DraftModel(draft, target, draft_tokens),
        "prompt lookup": PromptLookup(draft_tokens),
    }
    budget, found = Budget(draft_tokens + 1, draft_tokens), []
    for temperature, rule in ((0.0, "greedy"), (1.0, "match"), (1.0, "rejection")):
        plain = answers(Decoder(target), sources, seed, temperature=temperature)
        for name, drafter in drafters.items():
            decoder = Decoder(target, drafter, budget)
            drafted = answers(decoder, sources, seed, temperature=temperature, verifier=rule)
            about = {"drafter": name, "T": temperature, "verifier": rule}
            found.append(about | measured(drafted, draft_tokens, plain))
    columns = list(found[0])
    rows = [[v if isinstance(v, str) else number(v) for v in row.values()] for row in found]
    print_table(Table("a toy: numbers spelled by a T5 pair", columns, rows))
    if output is not None:
        write_record(output, {"rows": found})


if __name__ == "__main__":
    typer.run(main)
