"""The decoding loop: propose a tree, verify it in one pass of the target, commit the path."""

from collections.abc import Iterator

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.sampling import RowRandom, SamplingConfig, probabilities
from drafthead.heads.target import Features
from drafthead.heads.tree import Budget, TokenTree
from drafthead.infer.autoregressive import plain_step
from drafthead.infer.planner import Planner
from drafthead.infer.run import Emitted, Run
from drafthead.infer.verifiers import Acceptance, Verifier


@torch.inference_mode()
def speculate(
    run: Run, drafter: Drafter, planner: Planner, verifier: Verifier
) -> Iterator[Emitted]:
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
            budget = planner.choose()
            if budget is None:
                emitted = plain_step(run, session)
            else:
                emitted = step(run, session, budget, verifier, draws)
            planner.learn(budget, run.last_lengths)
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
        stats.verified_nodes += tree.num_nodes
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
        run.roots = acceptance.bonus
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
    in_place = len(kept_lengths) == 1 and (tree.width <= 1 or width == 1)
    run.cache.commit(path, acceptance.length, max(run.lengths), in_place)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    kept = features.map(lambda hidden: hidden[rows, path])
    session.commit(Committed(tokens[:, :width], kept, acceptance.length))
