"""The exact law of a target's first three tokens, and whether many answers follow such a law."""

import torch
from scipy.stats import chisquare

from drafthead.core.sampling import SamplingConfig, probabilities
from drafthead.core.target.target import Target


def law_of_three_tokens(
    target: Target, prompt: list[int], sampling: SamplingConfig
) -> torch.Tensor:
    """Exact probabilities [V, V, V] of the first three tokens, one pass over all continuations."""
    vocab = target.vocab_size
    pairs = torch.cartesian_prod(torch.arange(vocab), torch.arange(vocab))
    logits = target.plain_logits(prompt, pairs, 3)
    probs = probabilities(logits, sampling).view(vocab, vocab, 3, vocab)
    first, second, third = probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def p_value(sequences: list[list[int]], law: torch.Tensor) -> float:
    """Chi-square p-value of answers of three tokens against a law [V, V, V], rare cells pooled."""
    vocab = len(law)
    codes = torch.tensor(sequences) @ torch.tensor([vocab**2, vocab, 1])
    observed = torch.bincount(codes, minlength=vocab**3).double()
    expected = law.flatten().double() * len(sequences)
    assert observed[expected == 0].sum() == 0, "a token outside the support was drawn"
    rare = expected < 5
    if rare.any():  # the chi-square law needs a few expected counts in each cell
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    kept = expected > 0
    total = expected[kept].sum() / len(sequences)
    return chisquare(observed[kept], expected[kept] / total).pvalue
