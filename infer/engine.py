"""The decoding loop: propose a tree, verify it in one pass of the target, commit the path."""

from collections.abc import Iterator

import torch

from drafthead.heads.base import Committed, Drafter, DraftSession
from drafthead.heads.sampling import RowRandom
from drafthead.heads.target import Features
from drafthead.heads.tree import Budget
from drafthead.infer.acceptance import to_host
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
    stats = run.stats
    with stats.phase("draft"):
        run.begin_random_step()
        tree = session.propose(budget, run.request.draft_sampling, draws)
    with stats.phase("verify"):
        output = run.verify(tree)
        stats.verified_nodes += tree.num_nodes
    with stats.phase("accept"):
        logits = output.logits
        if run.processing is not None:
            logits = run.processing.behind_nodes(tree, logits)
        acceptance, tokens = run.accept(verifier, tree, logits)
        answers, paths = to_host(tokens, acceptance)
    with stats.phase("commit"):
        commit(run, session, acceptance, tokens, output.features, paths)
        run.roots = acceptance.bonus
        emitted = run.take_step(answers)
        run.keep_active(session)
    return emitted


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
