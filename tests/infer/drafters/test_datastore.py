"""An index of what a target has written, and trees of what followed the same words there."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import byte_tokenizer, tiny_llama

from drafthead.heads.drafting.drafter import NO_OUTLOOK
from drafthead.heads.errors import UserError
from drafthead.heads.target.target import Target
from drafthead.heads.trees.tree import PADDING, Budget, ancestor_mask
from drafthead.infer import Decoder
from drafthead.infer.drafters.datastore import (
    DEPTH,
    LEVELS,
    MATCHES,
    Datastore,
)
from drafthead.infer.drafters.earlier import Earlier
from drafthead.infer.drafters.guess_tree import Counted, GrowingTree, GuessTree, token_tree
from drafthead.infer.drafters.match_record import MEMORY
from drafthead.infer.drafters.past import Past
from drafthead.infer.drafters.store_lookup import StoreLookup, load_stored
from drafthead.infer.drafters.stored import SEPARATOR, ngram_number, ngram_numbers
from drafthead.lab.theory.replayed_lookup import accepted, reached, replayed


def letters(text: str) -> list[int]:
    """One token a letter."""
    return [*map(ord, text)]


def store_of(*texts: str) -> Datastore:
    return Datastore.of(map(letters, texts), "v")


def found(store: Datastore, past: str) -> list[tuple[float, str]]:
    """Continuations as text; what follows a separator is cut off."""
    result = []
    for weight, tokens in store.continuations(letters(past)):
        end = tokens.index(SEPARATOR) if SEPARATOR in tokens else len(tokens)
        result.append((weight, "".join(map(chr, tokens[:end]))))
    return result


def test_what_followed_the_longest_ngram_counts_most() -> None:
    store = store_of("abcdefgX", "zzcdefgY", "ggfgZ")
    assert found(store, "abcdefg") == [
        (1.0, "X"),  # after six letters
        (0.2, "X"), (0.2, "Y"),  # after four
        (0.075, "X"), (0.075, "Y"),
        (0.05 / 3, "X"), (0.05 / 3, "Y"), (0.05 / 3, "Z"),
    ]  # fmt: skip


def test_unknown_words_have_no_continuation() -> None:
    store = store_of("abcdef")
    assert found(store, "xy") == found(store, "a") == found(store, "") == []


def test_a_number_of_one_ngram_is_that_of_many() -> None:
    tokens = letters("abcdefg")
    numbers = ngram_numbers(np.array(tokens), 3)
    assert [ngram_number(tokens[n : n + 3]) for n in range(5)] == numbers.tolist()


def test_what_has_a_continuation_is_known() -> None:
    store = store_of("abcdef", "xbcy")
    for past in ("zbc", "ef", "fx", "c", ""):
        assert bool(store.matched(letters(past))) == bool(found(store, past))


def test_the_longest_ngram_that_is_found_again_counts() -> None:
    store = store_of("abcdefgX")
    for past, length in (("abcdef", 6), ("xbcdef", 4), ("xxcde", 3), ("fg", 2), ("g", 0), ("", 0)):
        assert store.matched(letters(past)) == length


def test_ngrams_do_not_reach_over_the_end_of_a_text() -> None:
    assert found(store_of("ab", "cd"), "bc") == []


def test_many_places_are_sampled_evenly() -> None:
    store = store_of(*(f"ab{chr(200 + n)}" for n in range(4 * MATCHES)))
    texts = [text for _, text in found(store, "ab")]
    assert len(texts) == MATCHES and texts[0] == chr(200) and texts[-1] == chr(199 + 4 * MATCHES)


def test_a_folder_gives_what_the_memory_gave(tmp_path: Path) -> None:
    store = store_of("abcdefg", "abcdxyz")
    store.save(tmp_path)
    loaded = load_stored(tmp_path, "v")
    assert isinstance(loaded.tokens, np.memmap)
    assert found(loaded, "abcd") == found(store, "abcd")
    assert loaded.record == store.record and loaded.record.tokens == 14


def damaged(folder: Path, what: str) -> None:
    """A datastore in which something is wrong."""
    folder.mkdir()
    store_of("abcdefg").save(folder)
    if what == "record":
        (folder / "datastore.json").write_text("{}")
    elif what == "table":
        (folder / "tokens.npy").write_bytes(b"no array")
    elif what == "lengths":
        np.save(folder / f"places-{min(LEVELS)}.npy", np.arange(3))
    else:
        (folder / f"places-{min(LEVELS)}.npy").unlink()


@pytest.mark.parametrize("what", ["record", "table", "missing", "lengths"])
def test_a_damaged_folder_is_refused(tmp_path: Path, what: str) -> None:
    damaged(tmp_path / "store", what)
    with pytest.raises(UserError, match="no datastore that can be read|is damaged"):
        load_stored(tmp_path / "store", "v")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    store_of("abc").save(tmp_path)
    with pytest.raises(UserError, match="another tokenizer"):
        load_stored(tmp_path, "w")


def grown_tree(first: str, texts: dict[str, float], nodes: int, depth: int = 9) -> GuessTree:
    """A chain whose tokens are right in half of all cases each, and the heaviest of some texts."""
    tree = GrowingTree()
    chain = letters(first)[: min(nodes, depth)]
    scores = [math.log(0.5) * place for place in range(1, len(chain) + 1)]
    tree.add_tree(GuessTree.chain(chain, scores))
    counted = Counted.of((weight, letters(text)) for text, weight in texts.items())
    tree.add_heaviest(counted, [0.8**place for place in range(1, depth + 1)], nodes, depth)
    return tree.tree


def grown(first: str, texts: dict[str, float], nodes: int, depth: int = 9) -> list[str]:
    """The path of each node of such a tree."""
    tree = grown_tree(first, texts, nodes, depth)
    paths = [""]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append(paths[parent] + chr(token))
    assert tree.depths == [len(path) for path in paths[1:]]
    return paths[1:]


def test_the_heaviest_continuations_are_in_the_tree() -> None:
    texts = {"bc": 2.0, "bd": 1.0, "e": 1.5}
    assert grown("", texts, 3) == ["b", "bc", "e"]
    assert grown("", texts, 9) == ["b", "bc", "e", "bd"]


def test_the_rows_own_past_goes_first_and_shares_nodes() -> None:
    assert grown("bdx", {"bc": 2.0, "bd": 1.0}, 4) == ["b", "bd", "bdx", "bc"]
    assert grown("bdx", {"bc": 2.0}, 2) == ["b", "bd"]


def test_no_path_is_deeper_than_asked() -> None:
    assert grown("abc", {"abcd": 1.0, "bbbb": 1.0}, 9, depth=2) == ["a", "ab", "b", "bb"]


def test_a_node_is_as_likely_as_its_share_of_the_texts() -> None:
    tree = grown_tree("", {"bc": 2.0, "bd": 1.0, "e": 1.0}, 9)
    chances = dict(zip("bcde", [0.75 * 0.8, 0.5 * 0.64, 0.25 * 0.64, 0.25 * 0.8], strict=True))
    assert {chr(token) for token in tree.tokens} == {*chances}
    for token, score in zip(tree.tokens, tree.scores, strict=True):
        assert math.exp(score) == pytest.approx(chances[chr(token)])


def test_what_both_say_has_the_better_score() -> None:
    tree = grown_tree("b", {"b": 3.0, "c": 1.0}, 9)
    assert [math.exp(score) for score in tree.scores] == pytest.approx([0.6, 0.2])
    assert grown_tree("b", {"b": 1.0, "c": 1.0}, 9).scores[0] == math.log(0.5)


def test_the_best_nodes_of_a_tree_are_a_tree() -> None:
    tree = GrowingTree()
    tree.add_tree(GuessTree.chain(letters("abc"), [-1.0, -2.0, -2.5]))
    other = tree.add(0, ord("x"), -1.5)
    tree.add(other, ord("y"), -0.1)  # no likelier than its parent
    best = tree.best(3)
    assert best.tokens == letters("axy") and best.parents == [0, 0, 2]
    assert best.depths == [1, 1, 2] and best.scores == [-1.0, -1.5, -1.5]
    assert tree.best(9).tokens == tree.tree.tokens
    assert tree.best(0).tokens == []


def test_rows_of_a_batch_have_their_own_trees() -> None:
    trees = [grown_tree("ab", {"c": 1.0}, 3), grown_tree("", {}, 3)]
    tree = token_tree([1, 2], trees, torch.device("cpu"))
    assert tree.tokens.tolist() == [[1, *letters("abc")], [2, *[PADDING] * 3]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, 0, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 1], [0, 1, 1, 1]]
    assert tree.max_depth == 2
    assert tree.ancestors.equal(ancestor_mask(tree.parents))


def test_accepted_tokens_are_a_path_from_the_root() -> None:
    tree = grown_tree("ab", {"ac": 1.0}, 3)
    assert [accepted(tree, letters(text)) for text in ("abx", "acx", "cab", "")] == [2, 2, 0, 0]


def test_decoding_is_played_again() -> None:
    """``ab`` is known after two letters; from then on the text is in the datastore."""
    lookup = StoreLookup(store_of("abcdefgh"))
    assert replayed(lookup, letters("xabcdefgh"), nodes=16) == [(0, 0), (0, 0), (2, 6)]
    shares = reached(lookup, [letters("xabcdefgh")], 16)
    assert shares[NO_OUTLOOK] == [1 / 3] * 6 + [0.0] * (DEPTH - 6)
    assert shares[0] == [0.0] * DEPTH
    assert shares[2] == [1.0] * 6 + [0.0] * (DEPTH - 6)


def test_the_planner_is_told_what_was_measured() -> None:
    store = store_of("abc")
    lookup = StoreLookup(store)
    assert lookup.chances(Budget(4, 2)) == (0.6, pytest.approx(0.36))
    store.record.reached[NO_OUTLOOK] = {4: [0.5, 0.25, 0.1], 8: [0.7, 0.4, 0.2]}
    store.record.reached[6] = {4: [0.9, 0.8, 0.7]}
    assert lookup.chances(Budget(6, 2)) == (0.5, 0.25)
    assert lookup.chances(Budget(16, 3)) == (0.7, 0.4, 0.2)
    assert lookup.chances_at(6, Budget(4, 2)) == (0.9, 0.8)
    assert lookup.chances_at(7, Budget(4, 2)) == (0.9, 0.8)  # the next lower one that was met
    assert lookup.chances_at(3, Budget(4, 2)) == (0.5, 0.25)  # not met while it was measured
    assert lookup.chances_at(0, Budget(4, 2)) == (0.0, 0.0)


def past_of(text: str) -> Past:
    past = Past(ord(text[0]))
    for token in letters(text[1:]):
        past.append(token)
    return past


@pytest.mark.parametrize(
    ("text", "outlook"),
    [
        ("xy", 0),
        ("xab", 2),
        ("xabc", 3),
        ("xabcdef", 6),
        ("xyxy", 5),
        ("xyzxyz", 5),
        ("stuvwxstuvwx", 7),
        ("abxab", 5),
    ],
)
def test_the_outlook_is_what_was_found_again(text: str, outlook: int) -> None:
    """Tokens found in the datastore; what the text repeats of itself goes first, as in a draft."""
    assert StoreLookup(store_of("abcdefg")).outlook(past_of(text)) == outlook


@pytest.mark.parametrize(
    ("text", "nodes", "expected"),
    [
        ("abXYab", 2, "XZ"),  # after two tokens of its own past, and two of the datastore
        ("abXYab", DEPTH + 1, "XYabXYabXYZ"),  # in a circle
        ("opqrstuvabXopqrstuvab", 2, "Xo"),  # after ten tokens of its own past
    ],
)
def test_the_likeliest_of_the_own_past_and_the_datastore_are_taken(
    text: str, nodes: int, expected: str
) -> None:
    lookup = StoreLookup(store_of("abZ"))
    lookup.stored.record.reached[2] = {2: [0.4] * DEPTH}
    tree = lookup.guess(past_of(text), nodes, DEPTH)
    assert "".join(map(chr, tree.tokens)) == expected


def test_under_rules_that_draw_a_tree_does_not_depend_on_what_was_learnt() -> None:
    lookup = StoreLookup(store_of("abZ"))
    lookup.stored.record.reached[2] = {2: [0.4] * DEPTH}
    past = past_of("abXYab")

    def guessed(follows: bool) -> list[int]:
        return lookup.guess(past, 1, DEPTH, follows).tokens

    assert guessed(follows=True) == guessed(follows=False) == letters("X")
    for _ in range(MEMORY):
        lookup.matches.add(2, was_right=False)
    assert guessed(follows=True) == letters("Z"), "matches of two tokens were wrong"
    assert guessed(follows=False) == letters("X")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A target that repeats itself, with a tokenizer, and a datastore of its answers."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_tokenizer()
    model = tiny_llama(vocab_size=len(tokenizer), initializer_range=0.3)
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    decoder = Decoder(Target(model))
    answers = decoder.generate([[30, 31, n] for n in range(40, 60)], max_new_tokens=40).sequences
    from drafthead.heads.target.loading import vocabulary_of

    (folder / "store").mkdir()
    Datastore.of(answers, vocabulary_of(tokenizer)).save(folder / "store")
    return folder


def test_what_was_said_before_is_accepted(saved: Path) -> None:
    options = {"dtype": "float32", "tree_nodes": 16}
    plain = Decoder.from_pretrained(saved / "target", dtype="float32")
    looked_up = Decoder.from_pretrained(saved / "target", draft=saved / "store", **options)
    prompt = [30, 31, 45]
    expected = plain.generate(prompt, max_new_tokens=40)
    result = looked_up.generate(prompt, max_new_tokens=40)
    assert result.sequences == expected.sequences
    assert result.stats.tau > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "missing"}, "no datastore that can be read"),
        ({"draft": "store", "draft_tokens": 3}, "sized by tree_nodes"),
    ],
)
def test_options_that_do_not_fit_are_refused(saved: Path, options, message: str) -> None:
    options = options | {"draft": f"ngrams:{saved / options['draft']}"}
    with pytest.raises(UserError, match=message):
        Decoder.from_pretrained(saved / "target", **options)


def test_a_target_without_a_tokenizer_has_no_datastore(saved: Path) -> None:
    with pytest.raises(UserError, match="needs the target's tokenizer"):
        Decoder.from_pretrained(Target(tiny_llama()), draft=saved / "store")


def test_the_record_is_for_people_too(saved: Path) -> None:
    record = json.loads((saved / "store" / "datastore.json").read_text())
    assert record["tokens"] == 20 * 40


# ---- what this process has written --------------------------------------------------------------


def written_before(*texts: str, limit: int = 1000) -> Earlier:
    earlier = Earlier(limit)
    for text in texts:
        tokens = letters(text)
        for place in range(len(tokens)):
            earlier.add(tokens, place)
    return earlier


def test_what_was_said_is_known_with_the_weights_of_a_datastore() -> None:
    past = letters("xbcd")
    found = {
        (weight, "".join(map(chr, text)))
        for weight, text in written_before("abcdE").continuations(past)
    }
    assert found == {(LEVELS[3], "E"), (LEVELS[2], "E")}


def test_a_text_is_not_its_own_past() -> None:
    earlier, text = Earlier(), letters("abXab")
    for place in range(len(text)):
        earlier.add(text, place)
    assert list(earlier.continuations(text)) == []
    assert list(earlier.continuations(letters("ab"))) != []


def test_what_follows_is_known_as_soon_as_it_is_there() -> None:
    earlier, text = Earlier(), letters("abc")
    earlier.add(text, 2)
    text += letters("de")
    assert [chr(token) for token in next(earlier.continuations(letters("ab")))[1]] == [
        "c",
        "d",
        "e",
    ]


def test_the_latest_tokens_stay() -> None:
    earlier = written_before("abX", "cdY", "efZ", "ghW", limit=8)
    for letter, stays in (("ab", False), ("ef", True), ("gh", True)):
        assert bool(list(earlier.continuations(letters(letter)))) == stays


@pytest.mark.parametrize("rows", [1, 2])
def test_a_second_answer_is_drafted_from_the_first(saved: Path, rows: int) -> None:
    options = {"dtype": "float32", "tree_nodes": 16, "draft": "answers"}
    decoder = Decoder.from_pretrained(saved / "target", **options)
    first, second = (decoder.generate([[30, 31, 45]] * rows, max_new_tokens=40) for _ in range(2))
    assert first.sequences == second.sequences
    assert second.stats.tau > max(3, first.stats.tau)


def test_under_rules_that_draw_a_seed_gives_the_same_text_whatever_was_said(saved: Path) -> None:
    options = {"dtype": "float32", "tree_nodes": 16, "draft": "answers"}
    decoder = Decoder.from_pretrained(saved / "target", **options)
    sampled = {"max_new_tokens": 40, "temperature": 1.0, "verifier": "rejection", "seed": 5}
    first = decoder.generate([30, 31, 45], **sampled).sequences
    decoder.generate([[30, 31, 45], [30, 31, 46]], max_new_tokens=40)
    assert decoder.generate([30, 31, 45], **sampled).sequences == first
