"""The decoding loop: propose a tree, verify it in one pass of the target, commit the path."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers.generation.logits_process import LogitsProcessorList

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities, sample
from drafthead.heads.target import Features, FeatureSpec, Target, TargetOutput
from drafthead.heads.tree import Budget, TokenTree
from drafthead.infer.compiled import new_cache
from drafthead.infer.logits_processing import PathProcessing
from drafthead.infer.results import DecodeStats
from drafthead.infer.rows import Batch
from drafthead.infer.stopping import Stop
from drafthead.infer.verifiers import Acceptance, Verifier

# Columns that the cache has at first for new tokens; it grows when an answer is longer.
FIRST_ROOM = 512

Emitted = dict[int, list[int]]  # row number -> the tokens that it has just gained


@dataclass(frozen=True)
class Request:
    """What to decode, and how."""

    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]  # most new tokens, for each prompt
    sampling: SamplingConfig
    seeds: Sequence[int]  # one for each prompt
    end_ids: frozenset[int]
    processors: Sequence[LogitsProcessorList] = ()  # one for each prompt, or none at all
    stops: Sequence[Stop] = ()  # one for each prompt, or none at all


class Run:
    """One batch on its way from prompts to answers; shared by every way of decoding."""

    def __init__(self, target: Target, request: Request, features: FeatureSpec, max_nodes: int):
        """`max_nodes` is the most nodes that one pass will have."""
        self.target, self.request, self.features = target, request, features
        self.max_nodes = max_nodes
        self.cache = new_cache(target)
        self.batch = Batch(request.limits, request.end_ids)
        self.batch = Batch(request.limits, request.end_ids, request.stops)
        self.stats = DecodeStats(
            accept_lengths=[row.accept_lengths for row in self.batch.rows],
            decoded_tokens=[0] * len(request.prompts),
        )
        self.random = None if request.sampling.greedy else RowRandom(request.seeds, target.device)
        self.prompt_ids, self.prompt_lengths = padded(request.prompts, target.device)
        self.lengths = [len(prompt) for prompt in request.prompts]  # committed, by running place
        self.processing: PathProcessing | None = None
        if request.processors:
            self.processing = PathProcessing(
                request.processors, request.prompts, self.batch, request.sampling.greedy
            )

    def prefill(self) -> tuple[Committed, Emitted]:
        """The pass over the prompts, which also gives each row its first token.

        Padding stands to the right, where a causal mask never looks, so the model builds its own.
        """
        ids, lengths = self.prompt_ids, self.prompt_lengths
        longest = ids.shape[1]
        positions = torch.arange(longest, device=ids.device).expand_as(ids)
        rows = torch.arange(ids.shape[0], device=ids.device)
        output = self.target.run(
            ids,
            positions,
            None,
            self.features.with_last(),
            self.cache,
            logits_to_keep=1,
        )
        assert output.features.last is not None
        # The last positions differ from row to row, so their logits are computed on their own.
        logits = self.target.project(output.features.last[rows, lengths - 1])
        room = min(max(self.request.limits), FIRST_ROOM) + self.max_nodes
        self.cache.commit_prompt(lengths, longest, room)
        first = self.pick(logits)
        following = torch.cat([ids[:, 1:], first[:, None]], dim=1)
        following[rows, lengths - 1] = first
        emitted = self.batch.take([[token] for token in first.tolist()])
        return Committed(following, output.features, lengths), emitted

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """The next token [B] of logits [B, V]: the most probable one, or a drawn one."""
        if self.processing is not None:
            logits = self.processing.behind_rows(logits)
        if self.random is None:
            return logits.float().argmax(-1)
        self.begin_random_step()
        return sample(probabilities(logits, self.request.sampling), self.random.uniform())

    def begin_random_step(self) -> None:
        """Start each running row's random stream for its next token."""
        if self.random is not None:
            self.random.begin_step([len(row.tokens) for row in self.batch.running_rows()])

    def verify(self, tree: TokenTree) -> TargetOutput:
        """One pass of the target over all nodes of a tree."""
        assert self.cache.lengths is not None
        positions = self.legal(self.cache.lengths[:, None] + tree.depths)
        mask = self.cache.mask(tree.ancestors, self.target.dtype)
        tokens = tree.tokens.clamp_min(0)  # padding nodes are computed and never accepted
        return self.target.run(tokens, positions, mask, self.features, self.cache)

    def legal(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions within the context: what lies past its end is never kept, but is computed."""
        if self.target.max_length is None:
            return positions
        return positions.clamp_max(self.target.max_length - 1)

    def take_step(self, answers: list[list[int]]) -> Emitted:
        """Give the running rows what a step committed; returns what they kept of it."""
        emitted = self.batch.take_step(answers)
        for number, tokens in emitted.items():
            self.stats.decoded_tokens[number] += len(tokens)
        return emitted

    def keep_active(self, session: DraftSession | None = None) -> None:
        """Take rows that have ended out of the running batch, many at a time."""
        places = self.batch.drop_idle()
        if not places:
            return
        self.lengths = [self.lengths[place] for place in places]
        rows = torch.tensor(places, device=self.target.device)
        self.cache.keep_rows(rows, max(self.lengths))
        if self.random is not None:
            self.random.keep_rows(places)
        if session is not None:
            session.keep_rows(rows)


@torch.inference_mode()
def speculate(run: Run, drafter: Drafter, budget: Budget, verifier: Verifier) -> Iterator[Emitted]:
    """Decode with a drafter; yields what each pass of the target gives."""
    draws = run.random if verifier.draws_children else None
    with run.stats.phase("prefill"):
        committed, emitted = run.prefill()
        session = drafter.start(run.prompt_ids, run.prompt_lengths)
        session.commit(committed)
        run.keep_active(session)
    yield emitted
    while run.batch.running:
        with run.stats.step():
            emitted = step(run, session, budget, verifier, draws)
        yield emitted


def step(
    run: Run,
    session: DraftSession,
    budget: Budget,
    verifier: Verifier,
    draws: RowRandom | None,
) -> Emitted:
    """Propose, verify, commit."""
    stats, sampling = run.stats, run.request.sampling
    with stats.phase("draft"):
        run.begin_random_step()
        tree = session.propose(budget, sampling, draws)
    with stats.phase("verify"):
        output = run.verify(tree)
    with stats.phase("accept"):
        logits = output.logits
        if run.processing is not None:
            logits = run.processing.behind_nodes(tree, logits)
        acceptance = accept(verifier, tree, logits, sampling, run.random)
        tokens = following_tokens(tree, acceptance)
        answers = to_host(tokens, acceptance.length)
    with stats.phase("commit"):
        kept_lengths = [len(answer) for answer in answers]
        commit(run, session, tree, acceptance, tokens, output.features, kept_lengths)
        emitted = run.take_step(answers)
        run.keep_active(session)
    return emitted


def accept(
    verifier: Verifier,
    tree: TokenTree,
    logits: torch.Tensor,  # [B, N, V]
    sampling: SamplingConfig,
    random: RowRandom | None,
) -> Acceptance:
    """Apply the acceptance rule to the target's scores in the form that it reads."""
    scores = logits if verifier.reads == "logits" else probabilities(logits, sampling)
    return verifier.rule(tree, scores, random)


def following_tokens(tree: TokenTree, acceptance: Acceptance) -> torch.Tensor:
    """The token [B, P] behind each node of the accepted path.

    For root "a", accepted "b c" and bonus "d" the path is a b c and the tokens are b c d.
    """
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    path_tokens = tree.tokens.gather(1, acceptance.path)
    following = torch.cat([path_tokens[:, 1:], acceptance.bonus[:, None]], dim=1)
    following[rows, acceptance.length - 1] = acceptance.bonus
    return following


def to_host(tokens: torch.Tensor, lengths: torch.Tensor) -> list[list[int]]:
    """The first lengths [B] of tokens [B, P] as lists: the step's one synchronisation."""
    both = torch.cat([lengths[:, None], tokens], dim=1).tolist()
    return [row[1 : 1 + row[0]] for row in both]


def commit(
    run: Run,
    session: DraftSession,
    tree: TokenTree,
    acceptance: Acceptance,
    tokens: torch.Tensor,  # [B, P]
    features: Features,  # of [B, N] nodes
    kept_lengths: list[int],
) -> None:
    """Keep the accepted path in the cache and tell the drafter."""
    run.lengths = [old + new for old, new in zip(run.lengths, kept_lengths, strict=True)]
    width = max(kept_lengths)
    path = acceptance.path[:, :width]
    in_place = tree.width <= 1 and len(kept_lengths) == 1
    run.cache.commit(path, acceptance.length, max(run.lengths), in_place)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    kept = features.map(lambda hidden: hidden[rows, path])
    session.commit(Committed(tokens[:, :width], kept, acceptance.length))


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as right-padded ids [B, T] and their lengths [B]."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    return ids.to(device), torch.tensor([len(prompt) for prompt in prompts], device=device)
