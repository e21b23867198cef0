"""How `benchmarks/peers.py` talks to a peer's process: a job a line, an answer a line, as JSON.

Peers run in environments of their own, so this file needs nothing but Python.
"""

import json
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Prompts to decode together, as token ids."""

    prompts: list[list[int]]
    max_new_tokens: int
    temperature: float  # 0 is greedy
    top_p: float
    seed: int


MARK = "peer: "  # begins the lines of the protocol; libraries may print others
Answer = Callable[[Job], Sequence[Sequence[int]]]  # the new tokens of each prompt


def work(answer: Answer, version: str, largest_batch: int = 2**20) -> None:
    """Answer jobs from standard input until it ends.

    Of each the seconds are reported and, of every answer, the new tokens up to its first end token.
    """

    def say(message: dict[str, object]) -> None:
        print(MARK + json.dumps(message), flush=True)

    say({"version": version, "largest_batch": largest_batch})
    for line in sys.stdin:
        job = Job(**json.loads(line))
        begin = time.perf_counter()
        answers = answer(job)
        seconds = time.perf_counter() - begin
        say({"answers": [list(map(int, each)) for each in answers], "seconds": seconds})


def until_end(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """The tokens up to the first end token, which is included; tokens 5 7 0 0 with end 7: 5 7."""
    for place, token in enumerate(tokens):
        if token in ends:
            return list(tokens[: place + 1])
    return list(tokens)
