"""Draft models whose tokenizers differ from the target's."""

import copy
import random

import pytest
import torch
from architectures import STATEFUL, tiny_model
from stages import more
from tiny import byte_tokenizer, letters_tokenizer, tiny_llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drafthead.contrib.other_tokenizer.other_tokenizer import OtherTokenizer, SharedTokens
from drafthead.contrib.other_tokenizer.translation import TranslatedRow, Translator, token_texts
from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.draft_model import DraftModel
from drafthead.infer.drafters.model_drafter import model_drafter

LETTERS = "abcdefghij"
PAIRS = ("ab", "bc", "ca", "de")


CPU = torch.device("cpu")


def translated(
    target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, text: str = ""
) -> TranslatedRow:
    """A row with a text of the target's."""
    row = TranslatedRow(Translator(target, draft))
    row.add(target.encode(text, add_special_tokens=False))
    return row


def test_a_token_that_grows_replaces_its_beginning() -> None:
    """``d`` was read; when ``e`` follows, the draft has one token for both."""
    target, draft = letters_tokenizer(LETTERS), letters_tokenizer(LETTERS, PAIRS)
    row = translated(target, draft, "ad")
    assert row.renew() == (0, draft.encode("ad"))
    row.add(target.encode("ef"))
    assert row.renew() == (1, [draft.convert_tokens_to_ids("de"), draft.convert_tokens_to_ids("f")])


def test_without_new_text_the_last_token_is_read_again() -> None:
    row = translated(letters_tokenizer(LETTERS), letters_tokenizer(LETTERS), "abc")
    row.renew()
    assert row.renew() == (2, [2])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_piece_by_piece_is_the_encoded_text(seed: int) -> None:
    target, draft = letters_tokenizer(LETTERS), letters_tokenizer(LETTERS[::-1], PAIRS)
    chance = random.Random(seed)
    row = translated(target, draft, "a")
    read: list[int] = []
    for _ in range(60):
        row.add(target.encode("".join(chance.choices("abcde", k=chance.randint(1, 9)))))
        stay, new = row.renew()
        read = read[:stay] + new
        if chance.random() < 0.1:
            row.cut(len(row.tokens) // 2)
    stay, new = row.renew()
    assert read[:stay] + new == draft.encode(row.text) == row.read


def test_a_copy_goes_on_by_itself() -> None:
    target = letters_tokenizer(LETTERS)
    row = translated(target, letters_tokenizer(LETTERS), "ab")
    row.renew()
    twin = copy.copy(row)
    twin.add(target.encode("c"))
    assert twin.renew() == (2, [2])
    assert (row.text, twin.text) == ("ab", "abc")


def test_half_a_character_waits_for_its_rest() -> None:
    target, draft = byte_tokenizer(), letters_tokenizer("aé")
    first, second = target.encode("é")
    row = translated(target, draft, "a")
    row.add([first])
    assert row.renew() == (0, [0])
    row.add([second])
    assert row.renew() == (1, [1])


def test_special_tokens_are_read_where_the_draft_has_them() -> None:
    ours = byte_tokenizer()
    same, other = translated(ours, byte_tokenizer()), translated(ours, letters_tokenizer("ab"))
    for row in (same, other):
        row.add(ours.encode("<|user|>ab"))
    assert same.text == "<|user|>ab"
    assert other.text == "ab"


def test_a_text_of_nothing_is_one_token() -> None:
    row = translated(letters_tokenizer(LETTERS), letters_tokenizer(LETTERS))
    assert row.renew() == (0, [0])


def test_shared_tokens_have_the_same_text() -> None:
    ours, theirs = letters_tokenizer("abcd", ("ab",)), letters_tokenizer("dxba", ("ab", "ba"))
    assert token_texts(ours) == {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4}
    shared = SharedTokens.of(token_texts(ours), token_texts(theirs), (5, 6), CPU)
    assert shared.draft_ids.tolist() == [0, 2, 3, 4]
    assert shared.target_ids.tolist() == [3, 1, 0, 4]
    assert shared.of_target.tolist() == [3, 2, 0, 0, 4]


def test_tokens_beyond_the_output_heads_are_not_shared() -> None:
    texts = token_texts(letters_tokenizer("abcd"))
    shared = SharedTokens.of(texts, texts, (3, 2), CPU)
    assert shared.target_ids.tolist() == [0, 1]


def test_bytes_that_are_no_character_are_not_shared() -> None:
    texts = token_texts(byte_tokenizer())
    assert "a" in texts and "\ufffd" not in "".join(texts)
    assert not [text for text in texts if text.startswith("<|")]


def renumbered(target: Target, order: list[int]) -> Target:
    """A copy of a model with other numbers for its tokens: number n there is order[n] here."""
    twin = copy.deepcopy(target.model)
    for part in (twin.get_input_embeddings(), twin.get_output_embeddings()):
        part.weight.data = part.weight.data[order]
    letters = "".join(target.tokenizer.convert_ids_to_tokens(order))
    return Target(twin, letters_tokenizer(letters))


@pytest.fixture
def pair() -> tuple[Target, Target]:
    """A target of letters, and itself with other numbers."""
    letters = "".join(map(chr, range(0x4E00, 0x4E40)))
    target = Target(tiny_llama(), letters_tokenizer(letters))
    order = list(range(64))
    random.Random(3).shuffle(order)
    return target, renumbered(target, order)


@pytest.mark.parametrize("rule", ["match", "rejection", "traversal"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_with_other_numbers_is_accepted_like_itself(pair, rule, temperature) -> None:
    target, twin = pair
    options = {"temperature": temperature, "seed": 4, "max_new_tokens": 40}
    if temperature:
        options["verifier"] = rule
    prompts = [[9, 8, 7], [20, 21]]
    results = [
        Decoder(target, drafter, Budget(4, 3)).generate(prompts, **options)
        for drafter in (DraftModel(target, target, 3), model_drafter(twin, target, 3))
    ]
    assert results[0].stats.accept_lengths == results[1].stats.accept_lengths
    assert results[0].stats.tau > 3.8


def test_rows_that_come_and_go_are_answered_alike(pair) -> None:
    target, twin = pair
    prompts = [[9, 8, 7] * count for count in (1, 5, 2, 3)]
    expected = Decoder(target).generate(prompts, max_new_tokens=20).sequences
    decoder = Decoder(target, model_drafter(twin, target, 3), Budget(4, 3))
    answers = list(decoder.serve(prompts, max_rows=2, max_new_tokens=20))
    assert [answer.tokens for answer in sorted(answers, key=lambda one: one.id)] == expected
    assert {length for answer in answers for length in answer.accept_lengths[:-1]} == {4}


def test_a_text_that_begins_with_what_was_remembered_is_drafted_for(pair) -> None:
    """The drafter's state of a remembered prompt is copied, and cut to what is common."""
    target, twin = pair
    prompt = [9, 8, 7, 12, 13, 14] * 4
    decoder = Decoder(target, model_drafter(twin, target, 3), Budget(4, 3))
    alone = decoder.generate(prompt, max_new_tokens=20)
    decoder.remember([*prompt[:20], 5, 6])
    again = decoder.generate(prompt, max_new_tokens=20)
    assert again.stats.reused > 0
    assert again.sequences == alone.sequences
    assert again.stats.accept_lengths == alone.stats.accept_lengths


def test_the_class_follows_from_the_tokenizers(pair) -> None:
    target, twin = pair
    assert type(model_drafter(target, target, 2)) is DraftModel
    assert type(model_drafter(twin, target, 2)) is OtherTokenizer


def test_a_draft_model_without_a_tokenizer_must_have_as_many_tokens(pair) -> None:
    target, twin = pair
    assert type(model_drafter(Target(twin.model), target, 2)) is DraftModel
    with pytest.raises(UserError, match="has no tokenizer that says what its 65 tokens are"):
        model_drafter(Target(tiny_llama(vocab_size=65)), target, 2)


@pytest.mark.parametrize("name", [name if name == "lfm2" else more(name) for name in STATEFUL])
def test_a_draft_model_that_cannot_go_back_is_refused(name: str) -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E40)))
    target = Target(tiny_llama(), letters_tokenizer(letters))
    own = Target(tiny_model(name, STATEFUL[name]), letters_tokenizer(letters[::-1]))
    with pytest.raises(UserError, match="another tokenizer is not available for .* running state"):
        model_drafter(own, target, 2)


def slow_tokenizer() -> PreTrainedTokenizerFast:
    """One that says that it is implemented in Python."""

    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    return Slow(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, "the draft model has no tokenizer"),
        (slow_tokenizer(), "the draft model's tokenizer is implemented in Python"),
    ],
)
def test_what_cannot_be_translated_is_refused(pair, tokenizer, message: str) -> None:
    target, _ = pair
    with pytest.raises(UserError, match=message):
        Translator(target.tokenizer, tokenizer)
