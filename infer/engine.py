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
        answers, paths = to_host(tokens, acceptance)
    with stats.phase("commit"):
        commit(run, session, acceptance, tokens, output.features, paths)
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


def to_host(
    tokens: torch.Tensor,  # [B, P]
    acceptance: Acceptance,
) -> tuple[list[list[int]], list[list[int]]]:
    """Each row's tokens and path as lists of its accept length: the step's one synchronisation."""
    everything = torch.cat([acceptance.length[:, None], tokens, acceptance.path], dim=1).tolist()
    width = tokens.shape[1]
    answers = [row[1 : 1 + row[0]] for row in everything]
    paths = [row[1 + width : 1 + width + row[0]] for row in everything]
    return answers, paths


def commit(
    run: Run,
    session: DraftSession,
    acceptance: Acceptance,
    tokens: torch.Tensor,  # [B, P]
    features: Features,  # of [B, N] nodes
    paths: list[list[int]],
) -> None:
    """Keep the accepted path in the cache and tell the drafter."""
    run.lengths = [old + len(path) for old, path in zip(run.lengths, paths, strict=True)]
    width = max(map(len, paths))
    path = acceptance.path[:, :width]
    in_place = len(paths) == 1 and paths[0] == list(range(width))
    run.cache.commit(path, acceptance.length, max(run.lengths), in_place)
    rows = torch.arange(path.shape[0], device=path.device)[:, None]
    kept = features.map(lambda hidden: hidden[rows, path])
    session.commit(Committed(tokens[:, :width], kept, acceptance.length))
