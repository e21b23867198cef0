"""Draft models that write text, and text as tokens of tokenizers that cut it in their own ways."""

import random
from itertools import pairwise, permutations

import pytest
import torch
from laws import law_of_three_tokens, p_value
from tiny import SPECIALS, byte_tokenizer, letters_tokenizer, tiny_llama
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drafthead.contrib.other_tokenizer.other_tokenizer import OtherTokenizer, own_tokens
from drafthead.contrib.other_tokenizer.translation import TranslatedRow, Translator
from drafthead.core.drafting.drafter import Committed
from drafthead.core.errors import UserError
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import Budget
from drafthead.infer import Decoder
from drafthead.infer.drafters.model_drafter import model_drafter
from drafthead.infer.drafters.with_lookup import WithLookup
from drafthead.infer.serving import ServeRequest

WORDS = [
    "def",
    "walk",
    "walking",
    "king",
    "the",
    "dog",
    "dogs",
    "12",
    "123",
    "2024",
    "return",
    "on",
]


def byte_coded(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer whose letters are bytes."""
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_level(words: list[str] = WORDS) -> PreTrainedTokenizerFast:
    """Bytes and merges of them, left to right, that make each word with a space before it."""
    alphabet = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab, merges = {token: number for number, token in enumerate(alphabet)}, []
    for word in ["ĠĠ", "ĠĠĠ", *(f"Ġ{word}" for word in words), *words]:
        for end in range(1, len(word)):
            if word[: end + 1] not in vocab:
                vocab[word[: end + 1]] = len(vocab)
                merges.append((word[:end], word[end]))
    return byte_coded(Tokenizer(models.BPE(vocab=vocab, merges=merges)))


def wordpiece() -> PreTrainedTokenizerFast:
    """Words in lower case without accents, and pieces with ``##``; spaces are not kept."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), *"().:=,", *WORDS, "##ing"]
    vocab = {token: number for number, token in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def sentencepiece() -> PreTrainedTokenizerFast:
    """NFKC, a space before the text, words with their spaces, letters, and bytes for the rest."""
    words = [(f"▁{word}", -2.0 - 0.1 * len(word)) for word in WORDS]
    letters = [(letter, -6.0) for letter in "▁abcdefghijklmnopqrstuvwxyz0123456789().:=,\n"]
    fallback = [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    pieces = [("<unk>", 0.0), *fallback, *words, *letters]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def characters() -> PreTrainedTokenizerFast:
    """One token for each character."""
    return letters_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789 ().:=,\nTé狗🐕")


TOKENIZERS = {
    "byte-level": byte_level, "bytes": byte_tokenizer, "wordpiece": wordpiece,
    "sentencepiece": sentencepiece, "characters": characters,
}  # fmt: skip
PAIRS = list(permutations(TOKENIZERS, 2))
CIRCLE = list(pairwise([*TOKENIZERS, *TOKENIZERS][: len(TOKENIZERS) + 1]))


def texts_of(tokenizer: PreTrainedTokenizerBase, before: str, text: str) -> list[str]:
    """The tokens that are proposed for a text, as they are written in the vocabulary."""
    found = Translator(tokenizer, characters()).tokens(before, text)
    return tokenizer.convert_ids_to_tokens(found)


@pytest.mark.parametrize(
    ("tokenizer", "before", "text", "expected"),
    [
        (byte_level, "the", " dogs on", ["Ġdogs", "Ġon"]),
        (byte_level, "the wal", "king on", ["king", "Ġon"]),  # not ``Ġwalking``
        (byte_level, "on ", "the dog", ["the", "Ġdog"]),  # the space is a token already
        (byte_level, ":\n   ", " return", ["Ġreturn"]),
        (byte_level, "12", "3 on", ["3", "Ġon"]),
        (sentencepiece, "the", " dog", ["▁dog"]),
        (sentencepiece, "", "dog", ["▁dog"]),  # the tokenizer's own space before a text
        (sentencepiece, "the wal", "king on", ["k", "i", "n", "g", "▁on"]),
        (sentencepiece, "the", "é", ["<0xC3>", "<0xA9>"]),
        (sentencepiece, "the", " ①2", ["▁12"]),  # NFKC
        (wordpiece, "the", " Walking (dogs)", ["walking", "(", "dogs", ")"]),
        (wordpiece, "the walk", "ing on", ["##ing", "on"]),
        (wordpiece, "the", " dög", ["dog"]),
        (characters, "the", " dog", [" ", "d", "o", "g"]),
    ],
)
def test_text_is_cut_into_the_targets_own_tokens(tokenizer, before, text, expected) -> None:
    assert texts_of(tokenizer(), before, text) == expected


def test_text_that_no_token_can_write_ends_the_proposal() -> None:
    """Nothing else could follow ``wal`` there."""
    tokenizer = letters_tokenizer("walk", ("lk",))
    assert texts_of(tokenizer, "wal", "kX") == ["k"]
    assert texts_of(letters_tokenizer("xy"), "x", "ab") == []


@pytest.mark.parametrize(
    ("draft", "own", "text"),
    [
        (byte_level, ["Ġdog", "Ã", "©"], " dogé"),
        (byte_level, ["Ġdog", "Ã"], " dog"),  # half a character is left out
        (byte_level, ["Ġdog", "<|user|>", "on"], " dog"),  # special to the draft model alone
        (sentencepiece, ["▁dog", "<0xE7>", "<0x8B>", "<0x97>"], " dog狗"),
        (sentencepiece, ["▁dog", "<0xE7>", "<0x8B>"], " dog"),
        (sentencepiece, ["<0xE7>", "<0x8B>", "<0x97>", "<0xE7>"], "狗"),  # the run is cut, not lost
        (wordpiece, ["dog", "##s", "."], " dogs."),
        (wordpiece, ["##ing"], "ing"),
    ],
)
def test_the_draft_models_tokens_are_whole_characters_of_text(draft, own, text) -> None:
    tokenizer = draft()
    if draft is byte_level:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>"]})
    assert Translator(characters(), tokenizer).text(tokenizer.convert_tokens_to_ids(own)) == text


def test_special_tokens_of_both_are_proposed() -> None:
    target, draft = byte_tokenizer(), byte_tokenizer(SPECIALS[::-1])
    own = draft.encode("ab<|end|>")
    assert Translator(target, draft).tokens("a", "b<|end|>") == target.encode("b<|end|>")
    assert Translator(target, draft).text(own) == "ab<|end|>"


def test_a_character_that_was_begun_is_finished_or_nothing_is_proposed() -> None:
    """The target has committed the first of the two bytes of é."""
    target, draft = byte_tokenizer(), characters()
    row = TranslatedRow(Translator(target, draft))
    first, second = target.encode("é")
    row.add([*target.encode("the "), first])
    assert (row.text, row.unfinished) == ("the ", [first])
    write = Translator(target, draft)
    assert write.continuation(row, draft.encode("é d")) == [second, *target.encode(" d")]
    assert write.continuation(row, draft.encode("dog")) == []


NASTY = "the dog  walking, on 12345 (2024):\n    return é 狗🐕 = dogs123 king\n\n\nthe walk"
PLAIN = "the dog walking on 12345 return the dogs king walk 2024 def on the dog"


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_the_targets_own_text_is_proposed_as_its_own_tokens(ours: str, theirs: str) -> None:
    """Wherever the target stands in it, and the draft model writes the rest."""
    target, draft = TOKENIZERS[ours](), TOKENIZERS[theirs]()
    ids = target.encode(PLAIN if "wordpiece" in (ours, theirs) else NASTY, add_special_tokens=False)
    text = target.decode(ids)
    translator = Translator(target, draft)
    row, tried = TranslatedRow(translator), 0
    for place in range(1, len(ids)):
        row.add(ids[place - 1 : place])
        read, whole = (draft.encode(t, add_special_tokens=False) for t in (row.text, text))
        own = whole[len(read) :]
        # The target may stand within a token of the draft model's; WordPiece sees no last space.
        if whole[: len(read)] == read and row.text + translator.text(own) == text:
            tried += 1
            assert translator.continuation(row, own) == ids[place:]
    assert tried > len(ids) / 5


def test_as_many_tokens_are_written_as_have_the_text_of_those_proposed() -> None:
    """60 characters of 30 pairs."""
    letters = "abcdefghij"
    pairs, singles = letters_tokenizer(letters, ("ab",)), letters_tokenizer(letters)
    row = TranslatedRow(Translator(pairs, singles))
    row.add(pairs.encode("ab" * 30))
    row.renew()
    assert [own_tokens(row, count) for count in (1, 3)] == [2, 6]
    row = TranslatedRow(Translator(singles, pairs))
    row.add(singles.encode("ab" * 30))
    row.renew()
    assert [own_tokens(row, count) for count in (1, 3)] == [1, 2]


def model_with(tokenizer: PreTrainedTokenizerBase, seed: int) -> Target:
    """A random model with a vocabulary that is padded."""
    return Target(tiny_llama(seed, vocab_size=len(tokenizer) + 3), tokenizer)


@pytest.mark.parametrize(("ours", "theirs"), CIRCLE)
def test_greedy_answers_are_those_of_plain_decoding(ours: str, theirs: str) -> None:
    """Random models write parts of characters and special tokens; rows join and leave."""
    target, draft = model_with(TOKENIZERS[ours](), 0), model_with(TOKENIZERS[theirs](), 1)
    prompts = ["the dog 12", "é狗", "a", "  return the dogs (on walking)"]
    ids = [target.tokenizer.encode(prompt) for prompt in prompts]
    expected = Decoder(target).generate(ids, max_new_tokens=20).sequences
    drafter = model_drafter(draft, target, 3)
    for budget in (drafter.budgets[-1], drafter.budgets[-4]):  # by text, and by shared tokens
        decoder = Decoder(target, drafter, budget)
        assert decoder.generate(ids, max_new_tokens=20).sequences == expected
        assert decoder.generate(ids[1], max_new_tokens=20).sequences == expected[1:2]
        served = decoder.serve(ids, max_rows=2, max_new_tokens=20)
        assert [one.tokens for one in sorted(served, key=lambda one: one.id)] == expected


@pytest.mark.parametrize("nodes", [4, 10])
def test_nodes_have_scores_by_which_lookup_beside_them_compares(nodes: int) -> None:
    """By text, and by shared tokens."""
    target, draft = model_with(byte_level(), 0), model_with(characters(), 1)
    drafter = WithLookup(model_drafter(draft, target, 3))
    budget = next(b for b in drafter.budgets if b.nodes == nodes and b.depth == 3)
    text = [40, 41, 42, 43, 40, 41, 42, 43]  # whose end lookup finds again
    session = drafter.start(torch.tensor([text[:-1]]), torch.tensor([len(text) - 1]))
    lengths, nothing = torch.tensor([len(text) - 1]), Features(last=None)
    session.commit(Committed(torch.tensor([text[1:]]), nothing, lengths))
    tree = known(session.propose(budget, SamplingConfig(temperature=0.0), None))
    assert tree.num_nodes > 1 and tree.tokens[0, 0] == text[-1]


def test_samples_follow_the_law_where_every_character_is_cut() -> None:
    """Tokens of the target: the two bytes of é, a letter and a space; of the draft: characters."""
    vocab = {token: number for number, token in enumerate(["Ã", "©", "a", "Ġ"])}
    target = Target(tiny_llama(2, vocab_size=4), byte_coded(Tokenizer(models.BPE(vocab, []))))
    draft = Target(tiny_llama(0, vocab_size=3), letters_tokenizer("é a"))
    drafter = OtherTokenizer(draft, target, 3, Translator(target.tokenizer, draft.tokenizer))
    sampling, prompt = SamplingConfig(temperature=1.0, top_p=0.9), [0, 1, 2, 3]
    result = Decoder(target, drafter).generate(
        [prompt] * 2000, max_new_tokens=3, temperature=1.0, top_p=0.9
    )
    assert result.stats.tau > 1.2
    assert p_value(result.sequences, law_of_three_tokens(target, prompt, sampling)) > 1e-5


def in_turn(tokenizer: PreTrainedTokenizerBase, following: dict[str, str]) -> Target:
    """A model that writes after each token the one that follows it there, or else the first."""
    size = len(tokenizer)
    model: LlamaForCausalLM = tiny_llama(vocab_size=size, hidden_size=64, num_hidden_layers=1)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(size, 64)
    head = torch.zeros(size, 64)
    for token, after in following.items():
        head[tokenizer.convert_tokens_to_ids(after), tokenizer.convert_tokens_to_ids(token)] = 1
    model.lm_head.weight.data = head
    return Target(model, tokenizer)


LETTERS = "abcdef"
ALPHABET = dict(zip(LETTERS, LETTERS[1:] + LETTERS[:1], strict=True))  # a b c d e f a b ...
TWO_BY_TWO = {"ab": "cd", "cd": "ef", "ef": "ab"}


def taus(target: Target, draft: Target) -> tuple[float, float]:
    """Tokens per pass by text and by shared tokens, with three levels."""
    drafter = model_drafter(draft, target, 3)
    assert isinstance(drafter, OtherTokenizer) and drafter.shared is not None
    prompt = target.tokenizer.encode("abc")
    by_text, by_token = (
        Decoder(target, drafter, budget).generate(prompt, max_new_tokens=41)
        for budget in (Budget(4, 3), Budget(10, 3))
    )
    assert by_text.sequences == by_token.sequences
    return by_text.stats.tau, by_token.stats.tau


def test_by_text_accepts_more_where_the_draft_models_best_tokens_are_not_shared() -> None:
    """It writes pairs of letters, which the target does not have."""
    draft = in_turn(letters_tokenizer(LETTERS[::-1], tuple(TWO_BY_TWO)), TWO_BY_TWO)
    by_text, by_token = taus(in_turn(letters_tokenizer(LETTERS), ALPHABET), draft)
    assert by_text == 4.0 > 1.9 * by_token


def test_by_token_accepts_more_where_the_target_does_not_write_as_its_tokenizer_does() -> None:
    """It writes ``b`` and ``c``, although it has a token for both."""
    target = in_turn(letters_tokenizer(LETTERS, ("bc", "de", "fa")), ALPHABET)
    draft = in_turn(letters_tokenizer(LETTERS[::-1]), ALPHABET)
    by_text, by_token = taus(target, draft)
    assert by_token == 4.0 > 2 * by_text


def test_vocabularies_that_share_nothing_draft_by_text() -> None:
    """Characters here, and pairs of them there."""
    target = in_turn(letters_tokenizer(LETTERS), ALPHABET)
    vocab = {pair: number for number, pair in enumerate(TWO_BY_TWO)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="ab"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    words.decoder = decoders.Fuse()
    draft = in_turn(PreTrainedTokenizerFast(tokenizer_object=words), TWO_BY_TWO)
    drafter = model_drafter(draft, target, 3)
    assert isinstance(drafter, OtherTokenizer) and drafter.shared is None
    for options in ({}, {"temperature": 0.01}, {"temperature": 0.01, "verifier": "traversal"}):
        result = Decoder(target, drafter).generate([0, 1, 2], max_new_tokens=41, **options)
        assert result.stats.tau == 4.0


@pytest.mark.parametrize("seed", range(3))
def test_a_text_that_was_cut_is_written_on_as_a_new_one(seed: int) -> None:
    target, draft = byte_level(), characters()
    chance, translator = random.Random(seed), Translator(byte_level(), characters())
    row = TranslatedRow(translator)
    row.add(target.encode(NASTY))
    row.cut(chance.randrange(8, len(row.tokens)))
    fresh = TranslatedRow(translator)
    fresh.add(row.tokens)
    assert (row.text, row.unfinished) == (fresh.text, fresh.unfinished)
    own = draft.encode("é on")
    assert translator.continuation(row, own) == translator.continuation(fresh, own)


def test_a_row_that_fails_leaves_the_others_their_answers() -> None:
    """The tokenizer of the draft's text cannot read that no token was chosen."""
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 64)))
    few = letters_tokenizer(letters[:0:-1], (letters[2:4],))
    target = Target(tiny_llama(0), letters_tokenizer(letters))
    small = Target(tiny_llama(1, vocab_size=len(few), num_hidden_layers=1), few)
    prompts = [[8, 9], [20, 21, 22]]
    bad, good = Decoder(target).generate(prompts, max_new_tokens=8).sequences
    spoilt = next(token for token in bad[2:] if token not in [*good, *bad[:2]])
    target.model.model.embed_tokens.weight.data[spoilt] = torch.nan
    decoder = Decoder(target, model_drafter(small, target, 3))
    assert isinstance(decoder.drafter, OtherTokenizer)
    with pytest.raises(UserError, match="no token can be chosen"):
        decoder.generate(prompts, max_new_tokens=8)
    requests = [ServeRequest(prompt, id=n, max_new_tokens=8) for n, prompt in enumerate(prompts)]
    found = {answer.id: answer for answer in decoder.serve(requests, max_rows=2)}
    assert "no token can be chosen" in found[0].error and found[1].tokens == good


class Compared(int):
    """A token that counts how often it is compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Compared.count += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_a_step_compares_as_many_tokens_after_a_long_text_as_after_a_short_one() -> None:
    letters = "abcdefgh"
    row = TranslatedRow(Translator(letters_tokenizer(letters), letters_tokenizer(letters[::-1])))
    counts = []
    for length in (100, 1000):
        row.add([n % 8 for n in range(length)])
        row.renew()
        row.read[:] = map(Compared, row.read)
        Compared.count = 0
        row.add([3])
        stay, new = row.renew()
        assert stay == len(row.read) - 1 and new == [4]
        counts.append(Compared.count)
    assert 0 < counts[1] <= counts[0]
