"""Plain decoding, one token a pass: the baseline of every speedup and the oracle of every test.

Eagerly it shares prompt pass, cache and sampling with the engine but neither trees nor verifiers,
so that an error in those cannot hide. Compiled it takes the engine's own graph of a step, for a
tree of nothing but a root, where nothing but a temperature changes the target's scores.
"""

from collections.abc import Iterator

import torch

from drafthead.heads.drafting.drafter import Committed, DraftSession, Ends
from drafthead.heads.trees.recipe import TreeRecipe
from drafthead.heads.trees.tree import TokenTree, TreeShape
from drafthead.infer.engine.batch_run import BatchRun, Emitted
from drafthead.infer.engine.compiled_target import CompiledTarget

ROOT = TreeShape(())  # a tree that proposes nothing


@torch.no_grad()
def decode_plainly(run: BatchRun) -> Iterator[Emitted]:
    """Decode without a drafter; yields what each pass of the target gives."""
    with run.stats.phase("prefill"):
        _, emitted = run.prefill()
        run.keep_active()
    yield emitted
    while run.batch.running:
        with run.stats.step():
            emitted = plain_step(run)
        yield emitted


def plain_step(run: BatchRun, session: DraftSession | None = None) -> Emitted:
    """One token for each row; a drafter that sits this step out learns of it through `session`."""
    run.stats.verified_nodes += 1
    answers, committed = feed_roots(run) if run.graphs is None else graph_of_roots(run, run.graphs)
    with run.stats.phase("commit"):
        run.roots = committed.ends.roots
        if session is not None:
            session.commit(committed)
        emitted = run.take_step(answers)
        run.keep_active(session)
    return emitted


def feed_roots(run: BatchRun) -> tuple[list[list[int]], Committed]:
    """A pass over the last committed token of each row, and the tokens that are picked behind."""
    cache = run.cache
    assert cache.lengths is not None
    with run.stats.phase("verify"):
        positions = run.legal(cache.lengths[:, None])
        node = torch.ones(1, 1, 1, dtype=torch.bool, device=positions.device)
        mask = cache.mask(node, run.target.dtype)
        output = run.target.run(run.roots[:, None], positions, mask, run.features, cache)
        run.lengths = [length + 1 for length in run.lengths]
        # A single row is where it belongs; the others stand in the column of the longest.
        path = torch.zeros_like(positions) if len(run.lengths) > 1 else None
        cache.commit(path, cache.lengths + 1, max(run.lengths))
    with run.stats.phase("accept"):
        tokens = run.pick(output.logits[:, -1])
        answers = [[token] for token in tokens.tolist()]
        last = output.features.last
        ends = Ends(tokens, None if last is None else last[:, 0])
        ones = torch.ones_like(tokens)
    return answers, Committed(tokens[:, None], output.features, ones, known_ends=ends)


def graph_of_roots(run: BatchRun, target: CompiledTarget) -> tuple[list[list[int]], Committed]:
    """As `feed_roots`, in one graph."""
    with run.stats.phase("verify"):
        run.begin_random_step()
        recipe = TreeRecipe.of(TokenTree.from_shape(ROOT, run.roots[:, None]))
        outcome = target.step(recipe, run.features, run.cache, run.draws(depth=0))
        run.commit(outcome)
    return outcome.answers, outcome.committed()
