"""Compiled passes: the output of the eager ones, and no graph made twice."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from stages import more
from traced import graphs_are_traced
from transformers import LogitsProcessorList

from drafthead.backends.compiled import Compiled
from drafthead.backends.compiled_target import CompiledTarget
from drafthead.backends.cpu.substitutions import attention_of_one
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.heads.families.head_drafter import drafter_for
from drafthead.infer.decoder import Decoder, decoder_for
from drafthead.infer.drafters.lookup import PromptLookup
from drafthead.infer.engine import stepper
from drafthead.infer.serving import ServeRequest
from drafthead.lab.exactness.oracle import OracleDecoder


@pytest.fixture(scope="module", params=["traced", more("compiled")])
def code(request: pytest.FixtureRequest) -> Iterator[str]:
    """What graphs are made of: what torch traces, or all that it compiles from that."""
    with graphs_are_traced() if request.param == "traced" else nullcontext():
        yield request.param


pytestmark = pytest.mark.usefixtures("code")


@pytest.fixture(scope="module")
def target(make_target) -> Target:
    """Of one layer, which is traced in half of the time of two."""
    return make_target(seed=0, layers=1)


@pytest.fixture(scope="module")
def compiled(make_target, code) -> CompiledTarget:
    return CompiledTarget(make_target(seed=0, layers=1))


def prompts(rows: int, length: int = 6) -> list[list[int]]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randint(8, 60, (length + row,), generator=generator).tolist() for row in range(rows)
    ]


@pytest.fixture(autouse=True)
def no_kind_needs_two_graphs(monkeypatch) -> Iterator[None]:
    """What differs within a kind is no reason to compile again, in the first steps or later."""
    made: set[tuple[Compiled, Hashable, int]] = set()
    make = Compiled._made

    def once(self: Compiled, graphs: list[Any], arguments: Sequence[Any]) -> Any:
        assert (self, self.kind(arguments), self.times_forgotten) not in made
        made.add((self, self.kind(arguments), self.times_forgotten))
        return make(self, graphs, arguments)

    monkeypatch.setattr(Compiled, "_made", once)
    yield


def graphs() -> int:
    return Compiled.made


def not_again(self: Compiled, *_) -> None:
    raise AssertionError(f"{self.function} is compiled again")


def test_compiled_answers_equal_eager_ones_and_steady_state_makes_no_graph(
    compiled, target, make_drafter
) -> None:
    """One row and several, plain steps, trees of several sizes, answers that outgrow the cache."""
    drafter = make_drafter("medusa:own", compiled)
    drafter.compile()
    plain = OracleDecoder(target)
    for rows in (1, 3):
        expected = plain.generate(prompts(rows), max_new_tokens=40).sequences
        assert Decoder(compiled).generate(prompts(rows), max_new_tokens=40).sequences == expected
        for budget in (Budget(2, 1), Budget(8, 3)):  # a graph for each depth
            decoder = Decoder(compiled, drafter, budget)
            assert decoder.generate(prompts(rows), max_new_tokens=40).sequences == expected
    before = graphs()
    assert before > 0
    for nodes, rows, tokens in ((8, 1, 40), (16, 1, 150), (4, 3, 40), (12, 5, 40)):
        decoder = Decoder(compiled, drafter, Budget(nodes, 3))
        decoder.end_ids = plain.end_ids = frozenset()
        answers = decoder.generate(prompts(rows, length=20), max_new_tokens=tokens).sequences
        expected = plain.generate(prompts(rows, length=20), max_new_tokens=tokens).sequences
        assert answers == expected
    assert graphs() == before
    assert compiled.backend.seconds >= compiled.backend.longest > 0


def test_requests_that_come_and_go_get_the_eager_answers(compiled, target, make_drafter) -> None:
    drafter = make_drafter("medusa:own", compiled)
    drafter.compile()
    requests = [prompt[: 1 + 3 * number] for number, prompt in enumerate(prompts(7, length=20))]
    expected = OracleDecoder(target).generate(requests, max_new_tokens=25).sequences
    for decoder in (Decoder(compiled), Decoder(compiled, drafter, Budget(8, 3))):
        answers = {
            answer.id: answer for answer in decoder.serve(requests, max_rows=3, max_new_tokens=25)
        }
        assert [answers[number].tokens for number in range(7)] == expected


@pytest.mark.parametrize(
    "head", ["parallel", *(pytest.param(f, marks=pytest.mark.slow) for f in ("eagle3", "hydra"))]
)
@pytest.mark.parametrize(
    "kinds", [((1, 0.0), (3, 1.0)), pytest.param(((3, 0.0), (1, 1.0)), marks=pytest.mark.slow)]
)
def test_compiled_heads_draft_as_eager_ones_and_make_no_graph_twice(
    target, make_drafter, head, kinds, code, monkeypatch
) -> None:
    """Trees of the head's own choice, and static ones where children are drawn.

    The second drafter stands for that of another process, which finds the graphs on the disk.
    """
    eager, compiled = (make_drafter(f"{head}:own", target) for _ in range(2))
    compiled.compile()
    budget = Budget(8, 3)
    decoders = [Decoder(target, drafter, budget) for drafter in (eager, compiled)]

    def answers(decoder: Decoder, rows: int, length: int, temperature: float) -> list[list[int]]:
        decoder.end_ids = frozenset()
        result = decoder.generate(
            prompts(rows, length), max_new_tokens=40, temperature=temperature, verifier=verifier
        )
        steps.append(result.stats.accept_lengths)
        return result.sequences

    # In the first rounds all kinds of pass are met; in the last, other lengths of text.
    for length in (6, 9, 20):
        before = graphs()
        for rows, temperature in kinds:
            verifier = "greedy" if temperature == 0 else "rejection"
            steps: list[list[list[int]]] = []
            expected, found = (answers(d, rows, length, temperature) for d in decoders)
            assert found == expected
            assert steps[0] == steps[1], "the same proposals are accepted"
    assert before > 0 and graphs() == before

    if code == "traced":
        return  # of which the disk has nothing
    monkeypatch.setattr(Compiled, "_compiled", not_again)
    another = make_drafter(f"{head}:own", target)
    another.compile()
    decoders[1] = Decoder(target, another, budget)
    for rows, temperature in kinds:
        verifier = "greedy" if temperature == 0 else "rejection"
        expected, found = (answers(d, rows, length, temperature) for d in decoders)
        assert found == expected
    assert graphs() > before


@pytest.mark.parametrize(
    "drafter", [PromptLookup(depth=4), pytest.param(None, marks=pytest.mark.slow)]
)
def test_after_a_warm_up_the_last_row_of_a_batch_makes_no_graph(make_target, drafter) -> None:
    """Two rows end after 3 tokens, the third goes on alone."""
    decoder = Decoder(
        CompiledTarget(make_target(seed=1, layers=1)), drafter, adaptive=drafter is not None
    )
    decoder.warm_up([3])
    before = graphs()
    decoder.end_ids = frozenset()
    first, *others = prompts(3)
    answers = decoder.serve(
        [ServeRequest(first, max_new_tokens=30)]
        + [ServeRequest(other, max_new_tokens=3) for other in others],
        max_rows=3,
    )
    assert sorted(len(answer.tokens) for answer in answers) == [3, 3, 30]
    assert graphs() == before


def test_a_compiled_recurrent_head_may_draft_the_smallest_trees_of_a_batch_first(
    target, make_head
) -> None:
    """The children of the root alone, then trees with more levels: the same graph finishes both.

    The head has a vocabulary of its own.
    """
    head = make_head("eagle3", target, draft_vocab_size=24)
    head.prepare(torch.arange(target.vocab_size))
    eager, compiled = (drafter_for(head, target) for _ in range(2))
    compiled.compile()
    for budget in (Budget(2, 1), Budget(8, 3)):
        results = [
            Decoder(target, drafter, budget).generate(prompts(3), max_new_tokens=6)
            for drafter in (eager, compiled)
        ]
        assert results[0].sequences == results[1].sequences
        assert results[0].stats.accept_lengths == results[1].stats.accept_lengths


DRAWN = {"temperature": 1.3}
FILTERED = {"temperature": 0.9, "top_k": 20, "top_p": 0.8}


@pytest.mark.parametrize(
    ("rows", "sampling"),
    [
        (1, {"temperature": 0.0}),
        (3, DRAWN),
        pytest.param(3, {"temperature": 0.0}, marks=pytest.mark.slow),
        pytest.param(1, DRAWN, marks=pytest.mark.slow),
        pytest.param(3, FILTERED, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_begins_with_its_draft_gives_the_text_of_plain_decoding(
    make_target, target, make_head, monkeypatch, rows, sampling
) -> None:
    """Greedy and matched, one row and several, from one graph for all sizes of trees."""
    compiled = CompiledTarget(make_target(seed=0, layers=1))
    head = make_head("medusa", compiled, output="shared")
    head.path_counts = {(): 9, (0,): 6, (1,): 3, (0, 0): 2, (0, 1): 1, (0, 0, 0): 1}
    drafter = drafter_for(head, compiled)
    drafter.compile()
    monkeypatch.setattr(stepper, "known", None)  # whoever needs the tokens before fails
    ask = {"max_new_tokens": 40, "seed": 5, **sampling}
    expected = OracleDecoder(target).generate(prompts(rows), **ask).sequences
    before = graphs()
    for nodes in (2, 5):
        decoder = Decoder(compiled, drafter, Budget(nodes, min(3, nodes - 1)))
        assert decoder.generate(prompts(rows), **ask).sequences == expected
    assert 0 < graphs() - before <= (1 if rows == 1 else 2), "of several rows one may stay last"


@pytest.mark.parametrize("way", ["plain", pytest.param("medusa:own", marks=pytest.mark.slow)])
def test_a_record_of_scores_changes_neither_rule_nor_text(
    compiled, target, make_drafter, way
) -> None:
    """Only the pass is a graph then, but tokens are still matched, as the seed wants."""
    ask = {"max_new_tokens": 20, "temperature": 1.0, "seed": 5}
    drafter = None if way == "plain" else make_drafter(way, compiled)
    decoder = Decoder(compiled, drafter, drafter and Budget(6, 2))
    found = decoder.generate(prompts(1), **ask, logprobs=1)
    assert found.sequences == OracleDecoder(target).generate(prompts(1), **ask).sequences
    assert found.logprobs is not None
    expected = Decoder(target).generate(prompts(1), **ask, logprobs=1).logprobs
    for here, there in zip(found.logprobs, expected, strict=True):
        assert here.processed == pytest.approx(there.processed, abs=1e-4)
        assert here.raw == pytest.approx(there.raw, abs=1e-4)


def test_a_compiled_decoder_is_a_custom_generate_as_well(compiled) -> None:
    ids = torch.tensor([prompt[:6] for prompt in prompts(3)])
    expected = compiled.model.generate(ids, max_new_tokens=20)
    function = Decoder(compiled).as_custom_generate()
    assert compiled.model.generate(ids, max_new_tokens=20, custom_generate=function).equal(expected)


def test_a_second_model_of_the_same_shape_runs_on_its_own_weights(compiled, make_target) -> None:
    Decoder(compiled).generate(prompts(1), max_new_tokens=4)
    other = make_target(seed=2, layers=1)
    expected = OracleDecoder(other).generate(prompts(1), max_new_tokens=40).sequences
    found = Decoder(CompiledTarget(other)).generate(prompts(1), max_new_tokens=40).sequences
    assert found == expected


def test_attention_of_one_query_equals_torchs_own() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    mask = torch.zeros(2, 1, 1, 9).masked_fill(torch.rand(2, 1, 1, 9) < 0.3, -1e30)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    torch.testing.assert_close(attention_of_one(query, key, value, mask, 8**-0.5), expected)
    grouped = torch.nn.functional.scaled_dot_product_attention(
        query, key[:, :2], value[:, :2], mask, enable_gqa=True
    )
    torch.testing.assert_close(
        attention_of_one(query, key[:, :2], value[:, :2], mask, 8**-0.5, enable_gqa=True), grouped
    )


def test_a_model_that_cannot_be_compiled_says_so(make_target) -> None:
    target = make_target(seed=1, layers=1)
    target.layers[0].register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
    decoder = decoder_for(target, None, None, compile=True)
    decoder.end_ids = frozenset()
    with pytest.raises(UserError, match="cannot be compiled.*without compile"):
        decoder.generate([1, 2, 3], max_new_tokens=4)


@pytest.fixture
def adapted(make_target) -> tuple[PeftModel, CompiledTarget]:
    """A target with two LoRA adapters that change its answers."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model = get_peft_model(make_target(seed=3, layers=1).model, config)
    model.add_adapter("second", config)
    return model, CompiledTarget(Target(model))


def test_adapters_that_are_switched_and_weights_that_change_are_seen_by_the_next_answer(
    adapted,
) -> None:
    """The graphs hold copies of the weights, while the pass over the prompt reads the model."""
    model, compiled = adapted
    [prompt] = prompts(rows=1)

    def answers() -> tuple[list[int], list[int]]:
        options = {"max_new_tokens": 12}
        found = Decoder(compiled).generate([prompt], **options).sequences
        expected = OracleDecoder(Target(model)).generate([prompt], **options).sequences
        return found[0], expected[0]

    seen = []
    for change in (
        lambda: None,
        lambda: model.set_adapter("second"),
        lambda: model.get_base_model().lm_head.weight.mul_(-1),
    ):
        with torch.no_grad():
            change()
        found, expected = answers()
        assert found == expected
        seen.append(found)
    assert len(set(map(tuple, seen))) == len(seen)


def test_a_compiled_draft_reads_the_targets_weights_anew_once_they_were_replaced(
    make_target, make_head
) -> None:
    target = make_target(seed=0, layers=1)
    compiled = CompiledTarget(target)
    drafter = drafter_for(make_head("eagle3", compiled), compiled)
    drafter.compile(compiled)
    decoder = Decoder(compiled, drafter, Budget(2, 1))

    def graphs_of_drafts() -> list[Any]:
        """Those that an answer leaves."""
        decoder.generate(prompts(1), max_new_tokens=6)
        kinds = [kind for function in drafter.backend.made for kind in function.graphs.values()]
        return [graph for graphs in kinds for graph in graphs]

    before = graphs_of_drafts()
    assert before and graphs_of_drafts() == before
    embedding = target.model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(-embedding.weight.detach())
    assert not [graph for graph in graphs_of_drafts() if graph in before]


def test_an_answer_goes_on_uncompiled_where_it_meets_more_layouts_than_there_are_graphs(
    target, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("drafthead.backends.compiled.MOST_GRAPHS", 0)
    decoder = Decoder(CompiledTarget(target), PromptLookup(3))
    expected = OracleDecoder(target).generate(prompts(2), max_new_tokens=20).sequences
    same = LogitsProcessorList([lambda _ids, scores: scores])
    for options in ({}, {"logits_processor": same}):  # whole steps, and passes alone
        found = decoder.generate(prompts(2), max_new_tokens=20, **options)
        assert found.sequences == expected
    warned = [record.message.split()[0] for record in caplog.records]
    assert sorted(warned) == ["CompiledPass._forward", "StepFunction._step", "move_columns"]
