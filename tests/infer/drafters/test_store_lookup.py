"""Trees of what a target has written before after the same words."""

import json
import math
from copy import copy
from pathlib import Path

import pytest
import torch
from lookup_texts import letters, past_of
from tiny import tiny_llama

from drafthead.core.errors import UserError
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import GuessTree, token_tree
from drafthead.core.trees.tree import PADDING, ancestor_mask
from drafthead.heads.growing.growing_tree import GrowingTree
from drafthead.infer import Decoder
from drafthead.infer.drafters.history import MEMORY
from drafthead.infer.drafters.ngram_table import NgramTable
from drafthead.infer.drafters.store_lookup import LEVELS, Continuations, Earlier, StoreLookup
from drafthead.lab.reports.index import accepted, replayed, tokens_a_pass


def grown_tree(first: str, texts: dict[str, float], nodes: int, depth: int = 9) -> GuessTree:
    """A chain whose tokens are right in half of all cases each, and the heaviest of some texts."""
    tree = GrowingTree()
    chain = letters(first)[: min(nodes, depth)]
    scores = [math.log(0.5) * place for place in range(1, len(chain) + 1)]
    tree.add_tree(GuessTree.chain(chain, scores))
    counted = Continuations.of((weight, letters(text)) for text, weight in texts.items())
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
    """After ``x`` the frequent letters are guessed; from then on the text is in the table."""
    lookup = StoreLookup(NgramTable.of([letters("abcdefgh")], "v", 3))
    assert replayed(lookup, letters("xabcdefgh"), nodes=16) == [2, 5]
    assert tokens_a_pass(lookup, [letters("xabcdefgh")], 16) == 4.5


def test_the_likeliest_of_the_own_past_and_of_the_table_are_taken() -> None:
    """What followed two tokens of the own text, and what followed them in the table."""
    lookup = StoreLookup(NgramTable.of([letters("abZ"), letters("abY")], "v", 3))
    assert {*lookup.guess(past_of("abXYab"), 2, 10).tokens} <= {*letters("XZY")}
    long = lookup.guess(past_of("opqrstuvabXopqrstuvab"), 2, 10)
    assert long.tokens == letters("Xo"), "after ten tokens of the own text"


def test_under_rules_that_draw_a_tree_does_not_depend_on_what_was_learnt() -> None:
    lookup = StoreLookup(NgramTable.of([letters("abZ"), letters("abY")], "v", 3))
    past = past_of("abXYab")

    def guessed(follows: bool) -> list[int]:
        return lookup.guess(past, 1, 10, follows).tokens

    assert guessed(follows=True) == guessed(follows=False) == letters("X")
    for _ in range(MEMORY):
        lookup.matches.add(2, was_right=False)
    assert guessed(follows=True) != letters("X"), "matches of two tokens were wrong"
    assert guessed(follows=False) == letters("X")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "missing"}, "no table of n-grams that can be read"),
        ({"draft": "store", "draft_tokens": 3}, "sized by tree_nodes"),
    ],
)
def test_options_that_do_not_fit_are_refused(saved: Path, options, message: str) -> None:
    options = options | {"draft": f"ngrams:{saved / options['draft']}"}
    with pytest.raises(UserError, match=message):
        Decoder.from_pretrained(saved / "target", **options)


def test_an_index_of_whole_texts_is_refused(saved: Path, tmp_path: Path) -> None:
    """Older versions wrote them; their record names no n-grams."""
    record = json.loads((saved / "store" / "datastore.json").read_text())
    (tmp_path / "datastore.json").write_text(json.dumps(record | {"ngrams": 0}))
    with pytest.raises(UserError, match="whole texts.*`drafthead data index`"):
        Decoder.from_pretrained(saved / "target", draft=f"ngrams:{tmp_path}")


def test_a_target_without_a_tokenizer_has_no_table(saved: Path) -> None:
    with pytest.raises(UserError, match="needs the target's tokenizer"):
        Decoder.from_pretrained(Target(tiny_llama()), draft=saved / "store")


def test_the_record_is_for_people_too(saved: Path) -> None:
    record = json.loads((saved / "store" / "datastore.json").read_text())
    assert record["tokens"] == 2 * 20 * 40


# ---- what this process has written --------------------------------------------------------------


def written_before(*texts: str, limit: int = 1000) -> Earlier:
    earlier = Earlier(limit)
    for text in texts:
        tokens = letters(text)
        for place in range(len(tokens)):
            earlier.add(tokens, place)
    return earlier


def test_what_was_said_is_known_with_the_weights_of_a_store_of_places() -> None:
    past = past_of("xbcd")
    found = {
        (weight, "".join(map(chr, text)))
        for weight, text in written_before("abcdE").continuations(past)
    }
    assert found == {(LEVELS[3], "E"), (LEVELS[2], "E")}


def test_a_text_is_not_its_own_past() -> None:
    earlier, past = Earlier(), past_of("abXab")
    for place in range(len(past.tokens)):
        earlier.add(past.tokens, place)
    assert list(earlier.continuations(past)) == []
    assert list(earlier.continuations(past.ahead(letters("Xab")))) == []
    assert list(earlier.continuations(copy(past))) != []
    assert list(earlier.continuations(past_of("ab"))) != []


def test_what_follows_is_known_as_soon_as_it_is_there() -> None:
    earlier, text = Earlier(), letters("abc")
    earlier.add(text, 2)
    text += letters("de")
    assert [chr(token) for token in next(earlier.continuations(past_of("ab")))[1]] == [
        "c",
        "d",
        "e",
    ]


def test_the_latest_tokens_stay() -> None:
    earlier = written_before("abX", "cdY", "efZ", "ghW", limit=8)
    for letter, stays in (("ab", False), ("ef", True), ("gh", True)):
        assert bool(list(earlier.continuations(past_of(letter)))) == stays


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
