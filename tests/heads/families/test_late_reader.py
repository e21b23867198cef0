"""What was committed while nothing was proposed is read later, in one pass, as if at once."""

from dataclasses import replace

import torch
from alone import Alone

from drafthead.core.drafting.drafter import Committed
from drafthead.core.sampling import SamplingConfig
from drafthead.core.target.features import Features, FeatureSpec
from drafthead.core.target.target import Target
from drafthead.core.trees.guesses import known
from drafthead.heads.families.late_reader import LateCommits, joined

GREEDY = SamplingConfig()


def part(rows: list[str], width: int) -> Committed:
    """Positions called by letters, which are their tokens and features; dots are padding."""
    letters = [[ord(letter) for letter in row.ljust(width, ".")] for row in rows]
    tokens = torch.tensor(letters)
    states = tokens[..., None].float()
    lengths = torch.tensor([len(row) for row in rows])
    return Committed(tokens, Features(states, (states + 1,)), lengths)


def test_parts_are_put_behind_each_other_row_by_row() -> None:
    whole = joined([part(["ab", "a"], 2), part(["c", "cd"], 2), part(["", "e"], 1)])
    read = ["".join(map(chr, row[:n])) for row, n in zip(whole.tokens, whole.lengths, strict=True)]
    assert read == ["abc", "acde"]
    assert torch.equal(whole.features.last[..., 0].long(), whole.tokens)
    assert torch.equal(whole.features.taps[0][..., 0].long(), whole.tokens + 1)


def test_padding_of_a_wide_table_is_cut_off() -> None:
    unread = LateCommits()
    unread.add(replace(part(["abcdefghi", "a"], 12), width=9))
    unread.keep_rows(torch.tensor([1]))
    committed = unread.take()
    assert committed.tokens.shape == (1, 9) and committed.ends.roots.tolist() == [ord("a")]
    assert unread.take() is None


def test_a_narrow_table_is_read_as_it_is() -> None:
    unread = LateCommits()
    unread.add(replace(part(["abc", "a"], 5), width=3))
    assert unread.take().tokens.shape == (2, 5)


def random_part(target: Target, features: FeatureSpec, lengths: list[int], seed: int) -> Committed:
    torch.manual_seed(seed)
    shape = len(lengths), max(lengths)
    states = [torch.randn(*shape, target.hidden_size) for _ in range(1 + len(features.layers))]
    tokens = torch.randint(8, target.vocab_size, shape)
    return Committed(tokens, Features(states[0], tuple(states[1:])), torch.tensor(lengths))


def test_reading_late_drafts_what_reading_at_once_drafts(
    target, make_drafter, drafter_name
) -> None:
    drafter = make_drafter(drafter_name, target)
    prompts, budget = torch.randint(8, 60, (2, 5)), drafter.budgets[-1]
    lengths = [[4, 5], [1, 3], [1, 1], [2, 1]]
    parts = [random_part(target, drafter.features, each, seed) for seed, each in enumerate(lengths)]
    late, at_once = (Alone(drafter, target, prompts, parts[0].lengths) for _ in range(2))
    for each in parts:
        late.commit(each)
        at_once.commit(each)
        expected = known(at_once.propose(budget, GREEDY, None))
    found = known(late.propose(budget, GREEDY, None))
    assert torch.equal(found.parents, expected.parents)
    assert torch.equal(found.tokens, expected.tokens)
