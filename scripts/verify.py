"""`drafthead verify-exactness`: are decoded answers distributed as the target's own?"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig
from drafthead.heads.target.any_target import target_of
from drafthead.infer.decoder import Decoder
from drafthead.infer.drafters.level_drafter import LevelDrafter
from drafthead.infer.request.prompts import encode_one
from drafthead.infer.verifiers import VERIFIERS, verifier_for
from drafthead.lab.exactness.exactness import (
    Evidence,
    SampledPair,
    drawn_differences,
    greedy_differences,
    later_tokens,
    sampled_start,
)
from drafthead.lab.exactness.rule_law import fit_of_rule
from drafthead.lab.exactness.target_law import LENGTH
from drafthead.lab.races.record import describe_run, prompt_ids
from drafthead.lab.reports.exactness import evidence_report
from drafthead.scripts import options

PROMPTS = (
    "Tell me about the sea.",
    "What is 17 times 23?",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""',
    "Translate to French: Where is the station?",
)
TABLES, BATCHES = 4, 8  # random tables, and batches of ROWS samples for each


def main(
    target: options.TargetName,
    head: options.HeadName = None,
    draft_model: options.DraftModelName = None,
    draft_layers: options.DraftLayers = None,
    prompt_lookup: options.PromptLookupSwitch = False,
    datastore: options.DatastoreFolder = None,
    temperature: Annotated[
        float, typer.Option(help="Of sampled answers; 0 tests only greedy answers.")
    ] = 1.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    repetition_penalty: Annotated[float, typer.Option(help="Of sampled answers; 1 is none.")] = 1.0,
    verifier: Annotated[
        str,
        typer.Option(
            help="Rule for sampled answers. auto is what decoding uses: match, or traversal with a "
            "draft model or own layers that are not compiled. typical and lenient are lossy and "
            "fail."
        ),
    ] = "auto",
    prompts: Annotated[
        str | None, typer.Option(help="JSONL, Parquet or data set; a few short prompts by default.")
    ] = None,
    limit: options.PromptLimit = 4,
    samples: Annotated[
        int, typer.Option(help="Times that the first tokens after each prompt are sampled.")
    ] = 256,
    answers: Annotated[int, typer.Option(help="Whole sampled answers per prompt.")] = 32,
    max_new_tokens: options.MaxNewTokens = 48,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of every proposal, root included.")] = 16,
    draft_tokens: options.DraftTokens = None,
    compile: Annotated[
        bool,
        typer.Option(
            help="Test compiled passes. The target's law is computed by passes that are not "
            "compiled, and so are plain answers, but for bfloat16 where we have kernels."
        ),
    ] = False,
    false_alarm: Annotated[
        float, typer.Option(help="Chance that exact decoding is called inexact.")
    ] = 1e-3,
    output: Annotated[Path | None, typer.Option(help="JSON file for all measurements.")] = None,
    seed: options.Seed = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16, float16 or auto. In 16 bits the target's own distribution "
            "changes with the shape of a pass, which blurs the test; compiled passes in bfloat16 "
            "must give plain decoding's text all the same."
        ),
    ] = "float32",
    device: options.DeviceName = "auto",
) -> None:
    """Test whether decoding with a drafter gives the answers of the target alone.

    Four tests: the acceptance rule on random tables whose distribution is known; the first tokens
    of sampled answers, and all later ones, against the target's distribution, which is computed by
    plain passes; greedy answers against plain decoding. "Found in 90%" is the power: the least
    total variation that is noticed with that chance. One of --head, --draft-model, --draft-layers,
    --prompt-lookup, --datastore is needed. The exit status is 0 for PASS and 1 for FAIL.
    """
    effort = Effort(samples, answers, max_new_tokens, false_alarm)
    if not (head or draft_model or draft_layers or prompt_lookup or datastore):
        raise UserError(
            "choose a head, draft_model, draft_layers, prompt_lookup or datastore: it is tested"
        )
    beside = prompt_lookup or datastore is not None
    by_levels = draft_model is not None or draft_layers is not None
    drafted = LevelDrafter if by_levels and not (beside or compile) else Drafter
    rule = verifier_for(verifier, temperature, drafted.sampling_rule)
    draft = options.draft_names(head, draft_model, draft_layers, prompt_lookup, datastore)
    decoder = Decoder.from_pretrained(
        target, draft, tree_nodes, draft_tokens, dtype=dtype, device=device, compile=compile
    )
    # The model as it is loaded, never compiled.
    reference = target_of(decoder.target.model, decoder.tokenizer)
    sampling = SamplingConfig(temperature, top_k, top_p)
    pair = SampledPair(decoder, reference, sampling, rule.name, repetition_penalty)
    ids = tested_prompts(prompts, limit, decoder, max_new_tokens)
    evidence = evidence_of(pair, ids, effort, seed)
    assert decoder.budget is not None
    about = {
        **describe_run(target, reference),
        "verifier": rule.name,
        "sampling": asdict(sampling),
        "repetition_penalty": repetition_penalty,
        "tree_nodes": decoder.budget.nodes,
        "compile": decoder.target.backend.compiles,
        "seed": seed,
        "prompts": len(ids),
        "max_new_tokens": max_new_tokens,
    }
    report = evidence_report(evidence, pair.sampling, about)
    report.show()
    if output is not None:
        report.write(output)
    if evidence.failures():
        raise typer.Exit(1)


@dataclass(frozen=True)
class Effort:
    """How much is sampled; raises UserError for numbers that test nothing."""

    samples: int  # of the first tokens, per prompt
    answers: int  # whole ones, per prompt
    max_new_tokens: int
    false_alarm: float  # chance that exact decoding is called inexact

    def __post_init__(self) -> None:
        if self.samples < 100 or self.answers < 1 or self.max_new_tokens < LENGTH:
            raise UserError(
                f"at least 100 samples, 1 answer and {LENGTH} new tokens are needed, got "
                f"{self.samples}, {self.answers} and {self.max_new_tokens}"
            )
        if not 0 < self.false_alarm < 1:
            raise UserError(f"false_alarm is a chance between 0 and 1, got {self.false_alarm}")


def evidence_of(pair: SampledPair, prompts: list[list[int]], effort: Effort, seed: int) -> Evidence:
    """All tests, one after the other; at temperature 0 greedy answers alone."""
    decoder, rule, length = pair.decoder, VERIFIERS[pair.verifier], effort.max_new_tokens
    same_bits, starts, tables, later, drawn = decoder.target.same_bits, [], [], None, None
    if not pair.sampling.greedy:
        tables = [fit_of_rule(rule, seed + table, BATCHES) for table in range(TABLES)]
        for number, prompt in enumerate(prompts):
            first_seed = seed + number * effort.samples
            starts.append(sampled_start(pair, prompt, effort.samples, first_seed))
        later = later_tokens(pair, prompts, effort.answers, length, seed)
        # Answers must then be those that plain decoding draws with the same seed.
        if pair.verifier == "match" and same_bits:
            drawn = drawn_differences(pair, prompts, length, seed)
    under = rule.name if rule.greedy else "auto"
    greedy = greedy_differences(decoder, pair.reference, prompts, length, under)
    return Evidence(
        pair.reference.dtype, effort.false_alarm, tables, starts, later, greedy, same_bits, drawn
    )


def tested_prompts(
    source: str | None, limit: int, decoder: Decoder, length: int
) -> list[list[int]]:
    """Token ids of the user's prompts, or of a few short ones."""
    if source is None:
        return [encode_one(text, decoder.tokenizer) for text in PROMPTS[:limit]]
    return prompt_ids(source, limit, decoder, length)
