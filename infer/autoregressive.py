"""Plain decoding, one token a pass: the baseline of every speedup and the oracle of every test.

It shares prompt pass, cache and sampling with the engine but neither trees nor verifiers, so that
an error in those cannot hide.
"""

from collections.abc import Iterator

import torch

from drafthead.infer.engine import Emitted, Run


@torch.inference_mode()
def decode_plainly(run: Run) -> Iterator[Emitted]:
    """Decode without a drafter; yields what each pass of the target gives."""
    with run.stats.phase("prefill"):
        committed, emitted = run.prefill()
        rows = torch.arange(committed.lengths.shape[0], device=committed.tokens.device)
        tokens = keep_active(run, committed.tokens[rows, committed.lengths - 1])
    yield emitted
    while run.batch.running:
        with run.stats.step():
            with run.stats.phase("verify"):
                logits = next_logits(run, tokens)
            with run.stats.phase("accept"):
                tokens = run.pick(logits)
                emitted = run.take_step([[token] for token in tokens.tolist()])
            with run.stats.phase("commit"):
                tokens = keep_active(run, tokens)
        yield emitted


def next_logits(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """Feed tokens [B], commit them, and give the logits [B, V] behind them."""
    cache = run.cache
    assert cache.lengths is not None
    positions = run.legal(cache.lengths[:, None])
    node = torch.ones(1, 1, 1, dtype=torch.bool, device=tokens.device)
    mask = cache.mask(node, run.target.dtype)
    output = run.target.run(tokens[:, None], positions, mask, run.features, cache)
    run.lengths = [length + 1 for length in run.lengths]
    one = torch.ones_like(cache.lengths)
    in_place = tokens.shape[0] == 1
    cache.commit(torch.zeros_like(tokens)[:, None], one, max(run.lengths), in_place)
    return output.logits[:, -1]


def keep_active(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """Drop the rows that have ended; returns the tokens of the others."""
    before = run.batch.running
    run.keep_active()
    if len(before) == len(run.batch.running):
        return tokens
    kept = [before.index(number) for number in run.batch.running]
    return tokens[torch.tensor(kept, dtype=torch.long, device=tokens.device)]
