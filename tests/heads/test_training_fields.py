"""Heads that differ only in how they were trained share measured costs."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin

import pytest

from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TreeShape
from drafthead.heads.base import HEADS, DraftHead, drafting_fields, is_for_training
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.heads.objectives.losses import TOKEN_LOSSES
from drafthead.infer import Decoder
from drafthead.lab.tracing import trace

PROMPT = [5, 6, 7, 8]


def another(config: Any, name: str, annotation: Any) -> Any:
    """Another value of a configuration's field."""
    value, plain = getattr(config, name), get_args(annotation)[0]
    if name == "loss":
        return next(loss for loss in sorted(TOKEN_LOSSES) if loss != value)
    if get_origin(plain) is Literal:
        return next(choice for choice in get_args(plain) if choice != value)
    if name == "ttt_steps":
        return 2 if value == 1 else 1
    return not value if plain is bool else plain(value / 2 + 0.25)


def trained_differently(head: DraftHead) -> DraftHead:
    """A head with these weights and another value in every field that only training reads."""
    config = head.config
    other = {
        field.name: another(config, field.name, field.type)
        for field in fields(config)
        if is_for_training(field.type)
    }
    assert all(getattr(config, name) != value for name, value in other.items())
    twin = type(head)(replace(config, **other))
    twin.load_state_dict(head.state_dict())
    twin.path_counts = {(): 10, (0,): 7}
    return twin.eval().requires_grad_(False)


@pytest.fixture(params=sorted(HEADS))
def twins(
    request: pytest.FixtureRequest, target: Target, make_head: Callable[..., DraftHead]
) -> tuple[DraftHead, DraftHead]:
    """Two heads of a family that differ in nothing that drafting reads."""
    head = make_head(request.param, target)
    return head, trained_differently(head)


def test_what_only_training_reads_does_not_change_a_draft(
    twins: tuple[DraftHead, DraftHead], target: Target
) -> None:
    shape = TreeShape.chain(3)
    decoders = [Decoder(target, drafter_for(head, target, shape)) for head in twins]
    traces = [trace(decoder, PROMPT, max_new_tokens=12) for decoder in decoders]
    trees = [[[node.token for node in step.nodes] for step in trace.steps] for trace in traces]
    assert trees[0] == trees[1]
    assert any(len(tree) > 1 for tree in trees[0]), "something was drafted"


def test_such_heads_share_costs(twins: tuple[DraftHead, DraftHead], target: Target) -> None:
    first, second = (repr(drafter_for(head, target, TreeShape.chain(3))) for head in twins)
    assert first == second


def test_heads_of_other_shapes_share_nothing(
    target: Target, make_head: Callable[..., DraftHead]
) -> None:
    heads = [make_head("eagle3", target, depth=depth) for depth in (5, 6)]
    assert drafting_fields(heads[0].config) != drafting_fields(heads[1].config)
