"""Plain decoding, one token a pass: the baseline of every speedup and the oracle of every test.

It shares prompt pass, cache and sampling with the engine but neither trees nor verifiers, so that
an error in those cannot hide.
"""

from collections.abc import Iterator

import torch

from drafthead.heads.base import Committed, DraftSession
from drafthead.heads.target import TargetOutput
from drafthead.infer.run import Emitted, Run


@torch.inference_mode()
def decode_plainly(run: Run) -> Iterator[Emitted]:
    """Decode without a drafter; yields what each pass of the target gives."""
    with run.stats.phase("prefill"):
        _, emitted = run.prefill()
        run.keep_active()
    yield emitted
    while run.batch.running:
        with run.stats.step():
            emitted = plain_step(run)
        yield emitted


def plain_step(run: Run, session: DraftSession | None = None) -> Emitted:
    """One token for each row; a drafter that sits this step out learns of it through `session`."""
    with run.stats.phase("verify"):
        output = feed_roots(run)
        run.stats.verified_nodes += 1
    with run.stats.phase("accept"):
        tokens = run.pick(output.logits[:, -1])
        answers = [[token] for token in tokens.tolist()]
    with run.stats.phase("commit"):
        if session is not None:
            ones = torch.ones_like(tokens)
            session.commit(Committed(tokens[:, None], output.features, ones))
        run.roots = tokens
        emitted = run.take_step(answers)
        run.keep_active(session)
    return emitted


def feed_roots(run: Run) -> TargetOutput:
    """Pass over the last committed token of each row and commit its place in the cache."""
    cache = run.cache
    assert cache.lengths is not None
    positions = run.legal(cache.lengths[:, None])
    node = torch.ones(1, 1, 1, dtype=torch.bool, device=positions.device)
    mask = cache.mask(node, run.target.dtype)
    output = run.target.run(run.roots[:, None], positions, mask, run.features, cache)
    run.lengths = [length + 1 for length in run.lengths]
    in_place = len(run.lengths) == 1
    first = torch.zeros_like(positions)
    cache.commit(first, torch.ones_like(cache.lengths), max(run.lengths), in_place)
    return output
