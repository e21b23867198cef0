"""A trace as one page of HTML that works offline."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from drafthead.infer.request.text_pieces import GrowingAnswer
from drafthead.lab.reports.report import page
from drafthead.lab.tracing import Trace

Kind = Literal["own", "drafted", "rejected"]


@dataclass(frozen=True)
class Span:
    """A piece of the answer's text, or of what was drafted in its place."""

    text: str
    kind: Kind
    step: int  # that brought it; -1 for the pass over the prompt
    node: int | None  # of that step's tree; None for the target's own token


def spans(trace: Trace, tokenizer: PreTrainedTokenizerBase) -> Iterator[Span]:
    """The answer in order, the best rejected draft before the token that replaced it.

    The texts of all but the rejected ones, joined, are the answer's text.
    """
    [answer] = trace.result.sequences
    text = GrowingAnswer(tokenizer, after=trace.prompt)
    yield Span(text.add(answer[0]), "own", -1, None)
    left = len(answer) - 1
    for number, step in enumerate(trace.steps):
        *accepted, last = step.path
        drafted = [*accepted[1:], last] if last else []
        for node in drafted[:left]:
            yield Span(text.add(step.nodes[node].token), "drafted", number, node)
        left -= len(drafted)
        if left <= 0:  # the answer ends with a drafted token
            continue
        children = (index for index, node in enumerate(step.nodes) if node.parent == last)
        rejected = next(children, None)  # the first of what was proposed there
        if rejected is not None:
            token = tokenizer.decode([step.nodes[rejected].token])
            yield Span(str(token), "rejected", number, rejected)
        yield Span(text.add(step.bonus), "own", number, None)
        left -= 1
    yield Span(text.rest(), "own", len(trace.steps) - 1, None)


def as_page(trace: Trace, tokenizer: PreTrainedTokenizerBase, about: dict[str, str]) -> str:
    """The page; `about` holds lines for its head, such as the names of models."""
    data = json.dumps(page_data(trace, tokenizer, about), ensure_ascii=True)
    return page("trace_page.html", {"data": data.replace("<", "\\u003c")})


def page_data(
    trace: Trace, tokenizer: PreTrainedTokenizerBase, about: dict[str, str]
) -> dict[str, Any]:
    """Return what the page shows, as JSON."""

    def named(token: int) -> str:
        return str(tokenizer.decode([token]))

    steps = [
        {
            "nodes": [{**vars(node), "text": named(node.token)} for node in step.nodes],
            "bonus": {"text": named(step.bonus), "target_prob": step.bonus_prob},
            "seconds": step.seconds,
        }
        for step in trace.steps
    ]
    return {
        "about": about,
        "rule": trace.rule,
        "prompt": tokenizer.decode(trace.prompt),
        "spans": [vars(span) for span in spans(trace, tokenizer)],
        "steps": steps,
    }
