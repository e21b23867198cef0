"""Beam search with drafts: one pass of the target scores the trees of all beams of all prompts.

On these scores beam search itself is replayed, round by round, for as long as every beam that is
chosen ends with a node that was scored. So the answers are those of plain beam search, whatever was
proposed, and a pass makes at least one round: with trees of the root alone it is plain beam search.

The rows of the cache are the beams, W for each prompt. After a pass a row goes on from the row that
its beam descends from, along the path of its tokens there; a row may have several descendants.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import torch

from drafthead.core.drafting.drafter import Committed, Drafter, DraftSession, at_last
from drafthead.core.errors import UserError
from drafthead.core.host import to_host
from drafthead.core.sampling import NO_TOKEN
from drafthead.core.target.features import Features
from drafthead.core.trees.guesses import known
from drafthead.core.trees.tree import TokenTree
from drafthead.infer.beams.beam_round import (
    BeamRules,
    Beams,
    best_extensions,
    candidates_of,
    next_round,
)
from drafthead.infer.drafters.store_lookup import ANSWERS
from drafthead.infer.engine.batch_run import BatchRun, BeamAnswer, Emitted, no_token_in
from drafthead.infer.engine.path_processing import PathProcessing, child_lists
from drafthead.infer.engine.prefill import ReadState, padded
from drafthead.infer.engine.stepper import Stepper
from drafthead.infer.planning.planner import Planner
from drafthead.infer.request.stopping import FinishReason

Children = Sequence[Mapping[int, Mapping[int, int]]]  # of each row: node -> token -> child
# Log-probabilities [P, W, V] after nodes of rows: (rows [P, W], nodes [P, W]).
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class BeamPlace:
    """The place of a beam in a pass: the end of a path of nodes of a row's tree."""

    row: int
    path: tuple[int, ...] = (0,)

    def after(self, token: int, children: Children) -> "BeamPlace | None":
        """The place one token further; None if that was not scored."""
        child = children[self.row].get(self.path[-1], {}).get(token)
        return None if child is None else BeamPlace(self.row, (*self.path, child))


class Search:
    """Beam search over one prompt, and how far the pass at hand has brought it."""

    def __init__(self, number: int, rules: BeamRules):
        self.number, self.rules = number, rules  # number of the prompt
        self.beams = Beams.first(rules.num_beams)
        self.places: Sequence[BeamPlace] = ()  # of beams; after the last round, of what they extend
        self.rounds = 0  # of this pass

    def begin(self, rows: Sequence[int]) -> None:
        """A pass has scored the trees of the rows, one for each beam."""
        self.places, self.rounds = [BeamPlace(row) for row in rows], 0

    def advance(self, table: Sequence[Sequence[float]], vocab: int, children: Children) -> bool:
        """Make a round by the best extensions [2, K]; returns whether the pass scored the next one.

        Raises UserError where the scores are NaN.
        """
        candidates = candidates_of(table, vocab)
        if candidates.scores.isnan().any():
            answer = [*self.beams.running[0], NO_TOKEN]
            raise UserError(no_token_in(f"prompt {self.number}", answer))
        self.beams, parents = next_round(self.beams, candidates, self.rules)
        self.rounds += 1
        before = [self.places[parent] for parent in parents]
        answers = zip(before, self.beams.running, strict=True)
        after = [place.after(answer[-1], children) for place, answer in answers]
        scored = [place for place in after if place is not None]
        goes_on = len(scored) == len(after) and not self.beams.over
        self.places = scored if goes_on else before
        return goes_on


def replay(searches: Sequence[Search], scores: Scores, children: Children) -> None:
    """Rounds of beam search over each prompt, until a beam was chosen that a pass has not scored.

    The host waits for the device once a round.
    """
    going = list(searches)
    while going:
        places = torch.tensor([[(p.row, p.path[-1]) for p in each.places] for each in going])
        log_probs = scores(*places.unbind(-1))
        sums = torch.stack([each.beams.scores for each in going]).to(log_probs.device)
        best = to_host(best_extensions(log_probs, sums, going[0].rules.num_candidates))
        vocab = log_probs.shape[-1]
        pairs = zip(going, best, strict=True)
        going = [each for each, table in pairs if each.advance(table, vocab, children)]


class BeamStepper(Stepper):
    """A target at work on the beams of a batch of prompts, whose run has `beam_answers` at the end.

    Its passes emit nothing: no token is sure before the end.
    """

    all_searches: Sequence[Search] = ()  # of each prompt
    searches: Sequence[Search] = ()  # those that are not over; each has W rows, in this order

    def begin(self, drafter: Drafter, past: ReadState | None) -> tuple[DraftSession, Emitted]:
        """Read the prompts and make the first round; returns the drafter's session of all beams.

        Raises UserError for a drafter that learns from answers.
        """
        if ANSWERS in drafter.names:
            raise UserError(
                "num_beams cannot be combined with drafts from answers: most beams are no answers"
            )
        if past is not None:
            self.cache = past.cache
        read = self.pass_over_prompts()
        session = drafter.start(read.ids, read.lengths) if past is None else past.session
        log_probs = log_softmax(self.target.next_logits(read.hidden))  # [B, V]
        if (processing := self.processing) is not None:
            log_probs = processing.after_rows(log_probs)
        # BART's decoder begins with a start token, and a first token of each answer.
        forced = max(0, len(self.target.decoder_prompt) - 1)
        self.searches = self.all_searches = searches_of(self.run, forced)
        for row, each in enumerate(self.searches):
            each.begin([row] * each.rules.num_beams)
        replay(self.searches, lambda rows, _: log_probs[rows], [{}] * len(self.searches))
        self.drop_ended()
        if not self.searches:
            return session, {}
        # The session gets its rows before it reads the prompt: drafters also read the token after
        # the prompt's last position, which differs from beam to beam.
        rows = self.ancestors()
        places = torch.tensor(rows, device=self.target.device)
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.keep_rows(places, max(self.lengths))
        session.keep_rows(places)
        first_tokens = [answer[-1] for answer in self.answers()]
        self.roots = torch.tensor(first_tokens, device=self.target.device)
        session.commit(read.chosen(rows).committed(self.roots, first_tokens))
        return session, {}

    def step(self, session: DraftSession, planner: Planner) -> Emitted:
        stats, proposal = self.run.stats, planner.draft(partial(self.propose, session))
        tree = self.root_alone() if proposal is None else known(proposal)
        stats.verified_nodes += tree.num_nodes
        with stats.phase("verify"):
            output = self.verify(tree)
        with stats.phase("accept"):
            first = 0
            for each in self.searches:
                each.begin(range(first, first + each.rules.num_beams))
                first += each.rules.num_beams
            replay(self.searches, self.scores(tree, output.logits), children_of(tree))
        with stats.phase("commit"):
            self.count_rounds()
            self.drop_ended()
            if self.searches:
                self.commit_beams(session, output.features, tree.num_nodes)
        return {}

    def answers(self) -> list[tuple[int, ...]]:
        """The unfinished answer of each row."""
        return [answer for each in self.searches for answer in each.beams.running]

    def scores(self, tree: TokenTree, logits: torch.Tensor) -> Scores:
        """The log-probabilities after nodes of a tree, of its logits [R, N, V]."""
        request = self.run.request
        if not request.processors:
            return lambda rows, nodes: log_softmax(logits[rows, nodes])
        rows = []
        for each in self.searches:
            row = self.run.rows[each.number]
            rows += [replace(row, tokens=list(answer)) for answer in each.beams.running]
        processing = PathProcessing(rows, request.end_ids, greedy=False)
        # transformers' beam search processes log-probabilities, and not logits.
        processed = processing.after_nodes(tree, log_softmax(logits))
        return lambda rows, nodes: processed[rows, nodes]

    def count_rounds(self) -> None:
        """Put the rounds of this pass into the statistics of each prompt."""
        run = self.run
        run.last_lengths = [each.rounds for each in self.searches]
        for each in self.searches:
            run.rows[each.number].accept_lengths.append(each.rounds)
            run.stats.decoded_tokens[each.number] += each.rounds

    def drop_ended(self) -> None:
        """Go on with the searches that are not over."""
        self.searches = [each for each in self.searches if not each.beams.over]
        self.run.running = [each.number for each in self.searches]
        if not self.searches:
            self.run.beam_answers = answers_of(self.run, [each.beams for each in self.all_searches])

    def commit_beams(self, session: DraftSession, features: Features, num_nodes: int) -> None:
        """Go on with the row that each beam descends from, and the path of its tokens there.

        The pass was over `num_nodes` nodes, and gave features [R, N, D].
        """
        paths = [place.path for each in self.searches for place in each.places]
        device = self.target.device
        path, counts = padded(paths, device)  # [R, P], [R]
        order = self.ancestors()
        rows = torch.tensor(order, device=device)
        if len(order) == len(self.lengths):  # all prompts go on
            prompts = self.run.request.prompts
            common = min(len(prompts[each.number]) for each in self.searches)
            self.cache.repeat_rows(order, common, num_nodes)
        else:
            # The nodes of the pass are still where the longest row of all ends.
            self.cache.keep_rows(rows, self.cache.longest)
        if order != list(range(len(self.lengths))):
            session.keep_rows(rows)
        assert self.cache.lengths is not None
        pairs = zip(order, paths, strict=True)
        self.lengths = [self.lengths[row] + len(nodes) for row, nodes in pairs]
        self.cache.commit(path, self.cache.lengths + counts, max(self.lengths))
        new_tokens = [
            list(answer[-each.rounds :]) for each in self.searches for answer in each.beams.running
        ]
        tokens, _ = padded(new_tokens, device)
        self.roots = at_last(tokens, counts)
        there = features.map(lambda hidden: hidden[rows[:, None], path])
        session.commit(Committed(tokens, there, counts, host_tokens=new_tokens, cache=self.cache))

    def ancestors(self) -> list[int]:
        """The row that each beam descends from; beams never leave their prompt."""
        return [place.row for each in self.searches for place in each.places]


def answers_of(run: BatchRun, found: Sequence[Beams]) -> list[BeamAnswer]:
    """The answers to each prompt, the best first, as many as were asked for.

    Where logits processors leave fewer, what fills up has a score near -1e9, as in transformers.
    """
    options, ends = run.request.beams, run.request.end_ids
    assert options is not None
    answers = []
    for prompt, beams in enumerate(found):
        pairs = zip(beams.ended, beams.ended_scores.tolist(), strict=True)
        for tokens, score in islice(pairs, options.num_return_sequences):
            reason: FinishReason = "end_token" if {*tokens[-1:]} & ends else "length"
            answers.append(BeamAnswer(prompt, tokens, score, reason))
    return answers


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [..., V] in float32 of logits [..., V]."""
    return logits.float().log_softmax(-1)


def searches_of(run: BatchRun, forced: int) -> list[Search]:
    """A search for each prompt of a run; `forced` is explained at `BeamRules`."""
    options, ends = run.request.beams, run.request.end_ids
    assert options is not None
    how = options.num_beams, options.length_penalty, options.early_stopping
    limits = enumerate(run.request.limits)
    return [Search(number, BeamRules(*how, ends, limit, forced)) for number, limit in limits]


def children_of(tree: TokenTree) -> Children:
    """Of each row, the child of a node that has a token.

    Parents (-1, 0, 0, 1) with tokens (9, 5, 6, 7) give {0: {5: 1, 6: 2}, 1: {7: 3}}.
    """
    return [
        {node: {token: child for child, token in pairs} for node, pairs in row.items()}
        for row in child_lists(tree)
    ]
