"""Logits that describe no distribution end in an error that names the prompt, never in a token."""

import copy

import pytest
import torch
from rehearsal import rehearse
from tiny import END
from transformers import LogitsProcessor

from drafthead.backends.cuda.recorded_target import RecordedTarget
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import TokenTree, TreeShape
from drafthead.heads.growing.levels import Guess, Nodes, filled_tree, levels_of
from drafthead.infer import Decoder
from drafthead.infer.verifiers import VERIFIERS
from drafthead.lab.exactness.oracle import OracleDecoder
from drafthead.lab.exactness.rule_law import OneStream

PROMPTS = [[9, 10, 11], [12, 13]]
SAMPLED = {"temperature": 1.0, "seed": 5}
WAYS = [
    {},
    SAMPLED,
    {**SAMPLED, "top_p": 0.9},
    *({**({} if v.greedy else SAMPLED), "verifier": name} for name, v in VERIFIERS.items()),
]
MATCHED = {**SAMPLED, "verifier": "match"}  # the text of plain decoding
SHORT = {"max_new_tokens": 4}


def spoiled(target: Target, token: int, number: float = torch.nan) -> Target:
    """The target with a state of `number` wherever it reads `token`."""
    model = copy.deepcopy(target.model)
    model.get_input_embeddings().weight.data[token] = number
    return Target(model)


def second_answer(target: Target, options: dict) -> int:
    """The first token of the second prompt's answer, which the first row does not read so early."""
    first, second = OracleDecoder(target).generate(PROMPTS, **SHORT, **options).sequences
    assert second[0] not in (*PROMPTS[0], *first[:2])
    return second[0]


@pytest.mark.parametrize("drafter", [None, "medusa:tree", "draft-model"])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_the_row_without_numbers_is_named(target, make_drafter, options, drafter) -> None:
    """At the prompt and at the first step after it; the row beside it is sound."""
    for token, count in ((PROMPTS[1][0], 0), (second_answer(target, options), 1)):
        broken = spoiled(target, token)
        decoder = Decoder(broken, drafter and make_drafter(drafter, target))
        message = f"no token can be chosen after {count} new tokens of prompt 1.*float16"
        with pytest.raises(UserError, match=message):
            decoder.generate(PROMPTS, **SHORT, **options)
        answer = decoder.generate(PROMPTS[0], max_new_tokens=1, **options)
        assert answer.sequences, "the decoder can be used again"


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "drawn"])
def test_a_single_logit_that_is_no_number_is_an_error_too(target, options) -> None:
    """transformers' greedy search answers with that token from then on."""
    model = copy.deepcopy(target.model)
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(UserError, match="no token can be chosen after 0 new tokens of prompt 0"):
        Decoder(Target(model)).generate(PROMPTS, **SHORT, **options)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "drawn"])
def test_a_recorded_step_names_the_row_as_well(make_target, options, monkeypatch) -> None:
    """The prompts are read eagerly; the token after them spoils the first recorded step."""
    rehearse(monkeypatch)
    target = make_target(seed=1, layers=1)
    broken = spoiled(target, second_answer(target, options))
    message = "no token can be chosen after 1 new tokens of prompt 1"
    with pytest.raises(UserError, match=message):
        Decoder(RecordedTarget(broken)).generate(PROMPTS, **SHORT, **options)


class NothingAfterEnd(LogitsProcessor):
    """A grammar of which no text goes on behind an end token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill((input_ids == END).any(1, keepdim=True), -torch.inf)


@pytest.mark.parametrize("options", [way for way in WAYS if "verifier" in way or not way], ids=str)
def test_what_comes_after_an_end_may_be_forbidden(target, make_drafter, options) -> None:
    """The draft proposes the end and more; other rows go on while this one is idle."""
    prompts = [[token] for token in range(8, 56)]
    decoder = Decoder(target, make_drafter("self", target))
    result = decoder.generate(
        prompts, max_new_tokens=24, logits_processor=[NothingAfterEnd()], **options
    )
    assert 0 < sum(result.finished) < len(prompts)


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_a_node_without_a_law_is_accepted_as_any_other(name) -> None:
    """The first token's law is the target's; 5 standard errors, a false alarm in a million runs."""
    count, law = 40_000, torch.tensor([0.4, 0.3, 0.2, 0.1])
    random = OneStream(count, torch.Generator().manual_seed(0))
    shape = TreeShape.from_paths([(0,), (1,), (0, 0)])

    def expand(nodes: Nodes) -> Guess:
        ids = torch.arange(4).expand(*nodes.tokens.shape, 4)
        return Guess(nodes.states, torch.zeros(ids.shape), ids, nodes.states)

    tree: TokenTree = filled_tree(
        shape,
        levels_of(shape, torch.device("cpu")),
        torch.zeros(count, dtype=torch.long),
        torch.zeros(count, 1, 0),
        expand,
        SamplingConfig(temperature=1.0),
        random,
    )
    scores = law.expand(count, shape.num_nodes, 4).clone()
    scores[tree.tokens == 3] = torch.nan
    found = VERIFIERS[name].rule(tree, scores, random)
    accepted = tree.tokens.gather(1, found.path[:, 1:2]).squeeze(1)
    first = torch.where(found.length > 1, accepted, found.bonus)
    shares = torch.bincount(first, minlength=4) / count
    assert (shares - law).abs().max() < 5 * (0.25 / count) ** 0.5
    assert (found.bonus[(found.length == 2) & (first == 3)] == -1).all()


class NothingAfter(LogitsProcessor):
    """A grammar of which no text goes on after one token."""

    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(input_ids[:, -1:] == self.token, -torch.inf)


@pytest.mark.parametrize("drafter", ["draft-model", "medusa:tree"])
def test_a_dead_end_beside_the_text_is_no_error(target, make_drafter, drafter) -> None:
    """Any of these tokens may be drafted; plain decoding answers unless it chooses one."""
    answered, small = 0, make_drafter(drafter, target)
    for token in range(10, 30):
        given = {**MATCHED, "max_new_tokens": 6, "logits_processor": [NothingAfter(token)]}
        try:
            expected = Decoder(target).generate([[8, 9, 50]], **given).sequences
        except UserError:
            with pytest.raises(UserError, match="a logits processor forbids every token"):
                Decoder(target).generate([[8, 9, 50]], **given)
            continue
        found = Decoder(target, small).generate([[8, 9, 50]], **given).sequences
        answered += 1
        assert found == expected
    assert answered > 5


@pytest.mark.parametrize("name", ["top_k", "typical"])
def test_a_lossy_rule_does_not_lead_into_a_dead_end(name) -> None:
    """Token 1 is good enough and nothing follows it; token 0 is the target's own choice."""
    rule = VERIFIERS[name]
    tree = TokenTree.from_shape(TreeShape.from_paths([(0,)]), torch.tensor([[3, 1]]))
    logits = torch.tensor([[[1.0, 0.9, -9.0, -9.0], [-torch.inf] * 4]])
    scores = logits if rule.reads == "logits" else logits.softmax(-1)
    random = OneStream(1, torch.Generator().manual_seed(0))
    found = rule.rule(tree, scores, None if rule.greedy else random)
    assert (found.length.item(), found.bonus.item()) == (1, 0)
