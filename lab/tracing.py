"""A trace of each step of an answer: the proposed tree, and what became of its nodes."""

from dataclasses import dataclass
from typing import Any

import torch

from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.core.target.target import TargetOutput
from drafthead.core.trees.tree import TokenTree
from drafthead.infer import Decoder, DecodeResult
from drafthead.infer.answers.emissions import in_time
from drafthead.infer.engine.batch_run import BatchRun
from drafthead.infer.engine.step import Outcome
from drafthead.infer.request.options import read_options, refuse_in_pieces
from drafthead.infer.request.prompts import Prompt
from drafthead.infer.scheduling.request_of import single


@dataclass(frozen=True)
class TracedNode:
    """A node of a proposed tree."""

    token: int
    parent: int  # index of a node; -1 for the root, which was committed before
    depth: int
    target_prob: float | None  # of the token after its parent; None for the root
    draft_prob: float | None  # likewise; None where children are chosen and not drawn
    accepted: bool


@dataclass(frozen=True)
class TracedStep:
    """One pass of the target."""

    nodes: tuple[TracedNode, ...]  # parents before their children
    bonus: int  # the target's own token after the accepted path
    bonus_prob: float
    seconds: dict[str, float]  # of each phase

    @property
    def path(self) -> list[int]:
        """The accepted nodes, the root first."""
        return [index for index, node in enumerate(self.nodes) if node.accepted]


@dataclass(frozen=True)
class Trace:
    """The answer to one prompt, step by step.

    Probabilities are the target's after temperature and filters; at temperature 0, without either.
    Logits processors are left out.
    """

    prompt: list[int]
    steps: list[TracedStep]  # after the pass over the prompt, which gave the first token
    rule: str  # that accepts
    result: DecodeResult


def target_probs(output: TargetOutput, sampling: SamplingConfig) -> torch.Tensor:
    """The target's distributions [N, V] after the nodes of the only row of a pass."""
    logits = output.logits[0]
    return logits.float().softmax(-1) if sampling.greedy else probabilities(logits, sampling)


def traced(tree: TokenTree, probs: torch.Tensor, outcome: Outcome) -> TracedStep:
    """The step of the only row of a tree, from the target's distributions [N, V] after its nodes.

    Times are filled in later.
    """
    length = int(outcome.acceptance.length[0])
    path = outcome.acceptance.path[0, :length].tolist()
    bonus = int(outcome.acceptance.bonus[0])
    parents, depths = tree.parents[0].tolist(), tree.depths[0].tolist()
    nodes = [
        TracedNode(
            token,
            parents[index],
            depths[index],
            float(probs[parents[index], token]) if index else None,
            draft_prob(tree, parents[index], token) if index else None,
            index in path,
        )
        for index, token in enumerate(tree.tokens[0].tolist())
        if token >= 0  # the others are padding, after all real nodes
    ]
    return TracedStep(tuple(nodes), bonus, float(probs[path[-1], bonus]), {})


def draft_prob(tree: TokenTree, parent: int, token: int) -> float | None:
    """The probability with which a child of `parent` was drawn; None where nothing was drawn."""
    if tree.draft_ids is None or tree.draft_probs is None:
        return None
    found = tree.draft_ids[0, parent] == token
    return float(tree.draft_probs[0, parent][found].sum())


def trace(decoder: Decoder, prompt: Prompt | None = None, **options: Any) -> Trace:
    """Decode one prompt as `Decoder.generate` does, and keep what each step proposed and accepted.

    Steps are eager, so their times are not those of compiled ones. Raises what `generate` raises,
    and UserError for several prompts.
    """
    settings = read_options(options)
    refuse_in_pieces(settings)
    run = BatchRun(single(decoder.request(prompt, settings)), decoder.target.device)
    method = decoder.method(run)
    steps: list[TracedStep] = []

    def watch(tree: TokenTree, output: TargetOutput, outcome: Outcome) -> None:
        """Record a step."""
        steps.append(traced(tree, target_probs(output, run.request.sampling), outcome))

    passes = in_time(method.decoding(run, watch=watch), run)
    next(passes)  # the prompt
    before = dict(run.stats.seconds)
    for _ in passes:
        seconds = run.stats.seconds
        steps[-1].seconds.update({phase: seconds[phase] - before[phase] for phase in seconds})
        before = dict(seconds)
    prompt_ids = list(run.request.prompts[0])
    return Trace(prompt_ids, steps, method.rule.name, decoder.result(run))
