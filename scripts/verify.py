"""`drafthead verify`: are decoded answers distributed as the target's own?"""

from dataclasses import asdict, replace
from typing import Annotated

import typer

from drafthead.core.errors import UserError
from drafthead.core.settings import (
    AtLeastOne,
    MaxNewTokens,
    RepetitionPenalty,
    RuleName,
    Seed,
    Temperature,
    TopK,
    TopP,
    settings,
)
from drafthead.scripts import options

TREE_NODES = 16  # of every proposal, when the user names no size


@settings(kw_only=True)
class Exact(options.Model):
    """The tested target, in numbers that do not blur the test."""

    dtype: Annotated[
        str,
        typer.Option(
            help="Number type: float32, bfloat16, float16 or auto. In 16 bits, the model's own "
            "distribution depends on the shape of a pass, which makes the test less precise. "
            "With our CPU kernels in bfloat16, text must still be identical."
        ),
    ] = "float32"


@settings(kw_only=True)
class Sampling:
    """Options of sampling the tested answers."""

    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    repetition_penalty: RepetitionPenalty = 1.0


@settings(kw_only=True)
class TestedDecoding(options.Drafting):
    """Options of what decodes the tested answers."""

    rule: RuleName = "auto"
    compile: Annotated[
        bool,
        typer.Option(
            help="Test decoding with compiled layers, on a GPU. The reference distribution still "
            "comes from passes that are not compiled."
        ),
    ] = False


@settings(kw_only=True)
class Amount:
    """Options of how much is tested."""

    prompts: options.Questions = None
    limit: options.PromptLimit = 4
    samples: Annotated[int, typer.Option(help="Samples of the first tokens after each prompt.")] = (
        256
    )
    answers: Annotated[AtLeastOne, typer.Option(help="Longer sampled answers per prompt.")] = 32
    max_new_tokens: MaxNewTokens = 48
    false_alarm: Annotated[
        float, typer.Option(help="Probability that exact decoding fails the test.")
    ] = 1e-3
    seed: Seed = 0


def main(
    *,
    model: Exact,
    decoding: TestedDecoding,
    sampling: Sampling,
    amount: Amount,
    output: options.JsonFile = None,
) -> None:
    """Test that drafts leave the model's own text: PASS or FAIL.

    Four tests compare: the acceptance rule with random tables whose distribution is known; the
    first tokens of sampled answers, and all later tokens, with the model's distribution; and greedy
    answers, which are all at temperature 0, with plain decoding. "Found in 90%" is the power of a
    test: the smallest total variation that it finds with 90 % probability.

    The rule auto is the one that decoding uses: match, or traversal for draft models and own layers
    that are not recorded. Trees have 16 nodes unless you set --tree-nodes. The exit status is 0 for
    PASS and 1 for FAIL.
    """
    from drafthead.core.sampling import SamplingConfig
    from drafthead.core.target.any_target import target_of
    from drafthead.infer.verifiers import verifier_for
    from drafthead.lab.exactness.exactness import Effort, SampledPair, evidence_of
    from drafthead.lab.races.record import describe_run, prompt_ids
    from drafthead.lab.reports.exactness import evidence_report

    effort = Effort(amount.samples, amount.answers, amount.max_new_tokens, amount.false_alarm)
    if not decoding.draft:
        raise UserError("choose the drafter to test with --draft")
    nodes = decoding.tree_nodes or TREE_NODES
    decoder = replace(decoding, tree_nodes=nodes).decoder(model, decoding.compile)
    assert decoder.drafter is not None and decoder.budget is not None
    # The model as it is loaded, never recorded.
    reference = target_of(decoder.target.model, decoder.tokenizer)
    default = "match" if decoder.target.backend.records else decoder.drafter.sampling_rule
    verifier = verifier_for(decoding.rule, sampling.temperature, default).name
    config = SamplingConfig(sampling.temperature, sampling.top_k, sampling.top_p)
    pair = SampledPair(decoder, reference, config, verifier, sampling.repetition_penalty)
    ids = prompt_ids(amount.prompts, amount.limit, decoder, amount.max_new_tokens)
    evidence = evidence_of(pair, ids, effort, amount.seed)
    about = {
        **describe_run(model.target, reference),
        "verifier": verifier,
        "sampling": asdict(config),
        "repetition_penalty": sampling.repetition_penalty,
        "tree_nodes": decoder.budget.nodes,
        "compile": decoder.target.backend.fuses,
        "seed": amount.seed,
        "prompts": len(ids),
        "max_new_tokens": amount.max_new_tokens,
    }
    options.finish(evidence_report(evidence, config, about), output)
    if evidence.failures():
        raise typer.Exit(1)
