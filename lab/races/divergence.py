"""The first difference of two answers, and whether the target's logits were nearly tied there."""

import math
from dataclasses import dataclass

import torch

from drafthead.infer import Target

NO_TOKEN = -1  # where one answer has ended and the other goes on


@dataclass(frozen=True)
class Divergence:
    """The place where a lossless greedy answer first differs from plain decoding's.

    `top2_gap` is the difference of the target's two largest logits there: near zero means a tie
    that rounding decided, anything else is an error. `token_gap` is by how much the logit of
    `token` lies below the largest; where one answer ends and the other goes on, it is that of the
    least probable token. `rounding_step` is the distance of neighbouring numbers of the target's
    dtype at the size of the largest logit.
    """

    mode: str
    prompt: int  # its number
    position: int  # in the answer
    plain_token: int
    token: int
    top2_gap: float
    token_gap: float
    rounding_step: float


def divergence(
    mode: str,
    index: int,
    prompt: list[int],
    plain: list[int],
    other: list[int],
    target: Target,
) -> Divergence:
    """The first difference of the answer `other` to prompt number `index` from `plain`."""
    position = first_difference(plain, other)
    plain_token, token = [*plain, NO_TOKEN][position], [*other, NO_TOKEN][position]
    text = torch.tensor([plain[:position]], dtype=torch.long, device=target.device)
    logits = target.plain_logits(prompt, text, 1)[0, -1].float()
    best, second = logits.topk(2).values.tolist()
    return Divergence(
        mode=mode,
        prompt=index,
        position=position,
        plain_token=plain_token,
        token=token,
        top2_gap=best - second,
        token_gap=best - float(logits[token] if token >= 0 else logits.min()),
        rounding_step=rounding_step(best, target.dtype),
    )


def first_difference(one: list[int], other: list[int]) -> int:
    """The first position at which two unequal answers differ.

    (5, 6, 7) and (5, 8) differ first at 1, (5, 6) and (5, 6, 7) at 2, where the shorter one ends.
    """
    places = range(min(len(one), len(other)) + 1)
    return next(i for i in places if one[i : i + 1] != other[i : i + 1])


def rounding_step(number: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of a dtype at the size of `number`.

    bfloat16 keeps 8 binary digits, so between 16 and 32 its numbers are 16 / 128 = 0.125 apart.
    """
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(number), info.tiny)))
