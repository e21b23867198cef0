"""Counts of n-grams with back-off, the trees that they grow, and chains drawn from them."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from lookup_texts import letters, past_of

from drafthead.core.errors import UserError
from drafthead.core.sampling import RowRandom, SamplingConfig
from drafthead.infer import Decoder
from drafthead.infer.drafters.lookup import drawn_chain, support_tables
from drafthead.infer.drafters.ngram_table import FOLLOWERS, ORDERS, Contexts, NgramTable, joined
from drafthead.infer.drafters.store_lookup import Earlier, StoreLookup, load_table
from drafthead.infer.drafters.with_lookup import WithLookup


def table_of(*texts: str, order: int = 3) -> NgramTable:
    return NgramTable.of(map(letters, texts), "v", order)


def chances(table: NgramTable, past: str, enough: int = FOLLOWERS) -> dict[str, float]:
    return {chr(token): p for token, p in table.distribution(letters(past), enough).items()}


# ---- counting -----------------------------------------------------------------------------------


def test_followers_of_a_context_are_counted_the_most_frequent_first() -> None:
    contexts = Contexts.of(joined(map(letters, ("abac", "ab"))), 1)
    assert contexts.after(letters("a")) == ([[ord("b"), 2], [ord("c"), 1]], 3, 2)
    assert contexts.after(letters("b")) == ([[ord("a"), 1]], 1, 1)
    assert contexts.after(letters("c")) is None, "nothing followed it"


def test_the_context_of_no_token_counts_unigrams() -> None:
    contexts = Contexts.of(joined(map(letters, ("abac", "ab"))), 0)
    assert contexts.after([]) == ([[ord("a"), 3], [ord("b"), 2], [ord("c"), 1]], 6, 3)


@pytest.mark.parametrize("length", range(ORDERS[-1]))
def test_counts_are_those_of_a_naive_count(length: int) -> None:
    generator = np.random.default_rng(0)
    texts = [generator.integers(4, size=size).tolist() for size in (0, 1, 2, 5, 60, 90)]
    naive = Counter(
        tuple(text[place : place + length + 1]) for text in texts for place in range(len(text))
    )
    expected: dict[tuple[int, ...], dict[int, int]] = {}
    for (*context, token), count in naive.items():
        if len(context) == length:
            expected.setdefault(tuple(context), {})[token] = count
    contexts = Contexts.of(joined(texts), length)
    assert len(contexts.numbers) == len(expected)
    for context, counts in expected.items():
        followers, seen, kinds = contexts.after(context)
        assert dict(followers) == counts
        assert (seen, kinds) == (sum(counts.values()), len(counts))
        assert [count for _, count in followers] == sorted(counts.values(), reverse=True)


def test_of_many_followers_the_most_frequent_are_kept_and_all_are_counted() -> None:
    texts = [[1, 1000 + token] for token in range(2 * FOLLOWERS) for _ in range(1 + (token == 70))]
    followers, seen, kinds = Contexts.of(joined(texts), 1).after([1])
    assert followers[0] == [1070, 2] and len(followers) == FOLLOWERS
    assert (seen, kinds) == (2 * FOLLOWERS + 1, 2 * FOLLOWERS)


# ---- back-off -----------------------------------------------------------------------------------


def test_a_context_that_was_not_seen_falls_back_on_a_shorter_one() -> None:
    """Of a b a c a b: b and c followed a (twice and once), and there are 3, 2 and 1 letters."""
    table = table_of("abacab", order=2)
    unigrams = {"a": 3 / 9, "b": 2 / 9, "c": 1 / 9}  # seen 6 and kinds 3, of which nothing is left
    assert chances(table, "") == chances(table, "x") == pytest.approx(unigrams)
    # After a: seen 3 and kinds 2, so (count + 2 x p) / 5.
    expected = {"b": (2 + 2 * 2 / 9) / 5, "c": (1 + 2 * 1 / 9) / 5, "a": 2 * 3 / 9 / 5}
    assert chances(table, "a") == chances(table, "xa") == pytest.approx(expected)


def test_each_longer_context_takes_its_share_of_what_is_left() -> None:
    table = table_of("xay", "zab", "zab")
    after_a = {"b": (2 + 2 * 2 / 14) / 5, "y": (1 + 2 * 1 / 14) / 5}
    assert chances(table, "qa")["b"] == pytest.approx(after_a["b"])
    assert chances(table, "xa")["y"] == pytest.approx((1 + after_a["y"]) / 2)
    assert chances(table, "xa")["b"] == pytest.approx(after_a["b"] / 2)
    assert [*chances(table, "xa")][:2] == ["y", "b"], "the most probable first"


def test_shorter_contexts_are_not_asked_where_there_is_enough() -> None:
    table = table_of("abacab", order=2)
    assert [*chances(table, "a", enough=2)] == ["b", "c"]
    assert chances(table, "a", enough=2)["b"] == pytest.approx(2 / 5)


def paths(table: NgramTable, text: str, nodes: int, depth: int = 4) -> list[str]:
    """The paths of the tree after a text, the likeliest first."""
    tree = StoreLookup(table).guess(past_of(text), nodes, depth)
    found = [""]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append(found[parent] + chr(token))
    order = sorted(range(len(tree.tokens)), key=lambda node: -tree.scores[node])
    return [found[node + 1] for node in order]


def test_the_most_probable_paths_are_the_tree() -> None:
    table = table_of(*["abcd"] * 8, *["abx"] * 3)
    assert paths(table, "qab", 3) == ["c", "cd", "x"]
    assert max(map(len, paths(table, "qab", 9, depth=2))) == 2


def test_a_path_may_join_texts_of_which_no_one_holds_it() -> None:
    """A store of places finds x y after ``ab``, and what followed that there; a table goes on."""
    table = table_of(*["abxy"] * 4, *["xyz"] * 9)
    assert "xyz" in paths(table, "ab", 4)


def test_the_rows_own_past_takes_part() -> None:
    assert "QRS" in paths(table_of("abx"), "abQRSTab", 6)


# ---- the folder ---------------------------------------------------------------------------------


def test_a_folder_gives_what_the_memory_gave(tmp_path: Path) -> None:
    table = table_of("abacab", "xay")
    table.save(tmp_path)
    loaded = load_table(tmp_path, "v")
    assert isinstance(loaded, NgramTable) and isinstance(loaded.contexts[1].numbers.base, np.memmap)
    assert loaded.record == table.record and loaded.record.tokens == 9
    for past in ("", "a", "xa", "ba", "q"):
        assert chances(loaded, past) == chances(table, past)


@pytest.mark.parametrize("what", ["record", "order", "table", "missing", "spans", "followers"])
def test_a_damaged_folder_is_refused(tmp_path: Path, what: str) -> None:
    table_of("abacab").save(tmp_path)
    if what == "record":
        (tmp_path / "datastore.json").write_text("[]")
    elif what == "order":
        record = (tmp_path / "datastore.json").read_text()
        (tmp_path / "datastore.json").write_text(record.replace('"ngrams": 3', '"ngrams": -3'))
    elif what == "table":
        (tmp_path / "numbers-1.npy").write_bytes(b"no array")
    elif what == "missing":
        (tmp_path / "numbers-2.npy").unlink()
    else:
        np.save(tmp_path / f"{what}-1.npy", np.zeros((2, 3)))
    with pytest.raises(UserError, match="no table of n-grams that can be read|is damaged"):
        load_table(tmp_path, "v")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    table_of("abc").save(tmp_path)
    with pytest.raises(UserError, match="another tokenizer"):
        load_table(tmp_path, "w")


# ---- drawn chains -------------------------------------------------------------------------------


def test_supports_of_different_sizes_become_tables() -> None:
    ids, probs = support_tables([[([5], [1.0]), ([7, 3, 5], [0.5, 0.25, 0.25])]])
    assert ids.tolist() == [[[5, 3, 7], [7, 3, 5]]]
    assert probs.tolist() == [[[1.0, 0.0, 0.0], [0.5, 0.25, 0.25]]]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_chains_are_drawn_from_the_tables_distributions(temperature: float) -> None:
    """1,000 chains after one text; 5 standard errors of each share."""
    table = table_of("abacab", "xay", "abc")
    rows, text = 1000, letters("xa")
    random = RowRandom(range(rows), torch.device("cpu"))
    random.begin_step([3] * rows)
    sampling = SamplingConfig(temperature=temperature)
    tree = drawn_chain([text] * rows, table.distribution, 2, sampling, random)
    for node, before in ((0, ""), (1, "b")):
        mine = tree.tokens[:, 1] == ord("b") if before else torch.ones(rows, dtype=torch.bool)
        law = table.distribution(letters("xa" + before))
        weights = {token: p ** (1 / temperature) for token, p in law.items()}
        drawn = tree.tokens[mine, node + 1]
        carried = dict(zip(*(t[mine][0, node].tolist() for t in supports(tree)), strict=True))
        for token, weight in weights.items():
            expected = weight / sum(weights.values())
            assert carried[token] == pytest.approx(expected)
            share = (drawn == token).double().mean().item()
            assert abs(share - expected) < 5 * (0.25 / len(drawn)) ** 0.5
    assert tree.draft_probs.sum(-1).allclose(torch.ones(1, dtype=torch.float64))
    assert all(len(set(ids)) == len(ids) for ids in tree.draft_ids.flatten(0, 1)[:50].tolist())


def supports(tree) -> tuple[torch.Tensor, torch.Tensor]:
    return tree.draft_ids, tree.draft_probs


# ---- decoding -----------------------------------------------------------------------------------

SAMPLED = {"temperature": 0.5, "seed": 0}


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "match"])
def test_a_folder_of_ngrams_drafts_what_was_said_before(saved: Path, sampled) -> None:
    options = {"dtype": "float32", "tree_nodes": 16}
    plain = Decoder.from_pretrained(saved / "target", dtype="float32")
    looked_up = Decoder.from_pretrained(saved / "target", draft=saved / "store", **options)
    prompts = [[30, 31, 40], [30, 31, 41]]
    expected = plain.generate(prompts, max_new_tokens=40, **sampled)
    result = looked_up.generate(prompts, max_new_tokens=40, **sampled)
    assert result.sequences == expected.sequences
    assert result.stats.tau > 3


def test_drawn_tokens_of_a_table_are_accepted(saved: Path) -> None:
    decoder = Decoder.from_pretrained(
        saved / "target", draft=saved / "store", dtype="float32", tree_nodes=4
    )
    options = {"max_new_tokens": 40, "temperature": 0.05, "verifier": "rejection"}
    result = decoder.generate([[30, 31, 45]] * 4, seed=3, **options)
    assert result.stats.tau > 1.2
    assert decoder.generate([30, 31, 45], seed=4, **options).sequences == result.sequences[1:2]


def test_a_table_goes_beside_a_head_and_learns_answers(target, make_drafter) -> None:
    """Answers stay those of the target; a second one is drafted from the first."""
    prompts, options = [[9, 10, 11], [12, 13]], {"max_new_tokens": 24}
    expected = Decoder(target).generate(prompts, **options).sequences
    table = NgramTable.of([[9, 10, 11, 12]], "", 2)
    stored = StoreLookup(table, Earlier())
    decoder = Decoder(target, WithLookup(make_drafter("medusa:tree", target), stored))
    first, second = (decoder.generate(prompts, **options) for _ in range(2))
    assert first.sequences == second.sequences == expected
    assert second.stats.tau > max(3, first.stats.tau)
