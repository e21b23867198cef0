"""What was written in this process: an index that grows with every committed token.

A server that gets similar requests drafts the next answers from the last ones (suffix decoding,
Oliaro et al., 2024, arXiv 2411.04975, keeps such an index as a suffix tree).
"""

from collections.abc import Iterator, Sequence

from drafthead.infer.drafters.datastore import DEPTH, LEVELS

PLACES = 4  # of one n-gram that are remembered, the latest
LIMIT = 200_000  # tokens that are remembered, at most

Place = tuple[list[int], int]  # a text, which may still grow, and a position in it
Index = dict[int, list[Place]]  # by hash of an n-gram: where the token after it is


class Earlier:
    """The latest texts of a process, by their n-grams. Several threads may use it."""

    def __init__(self, limit: int = LIMIT):
        """When half of `limit` tokens have come since the last time, what came before those goes.

        So between half of them and all of them are remembered.
        """
        self.limit, self.count = limit, 0
        self.young: Index = {}
        self.old: Index = {}

    def add(self, text: list[int], place: int) -> None:
        """Remember that the token at a place of a text follows the tokens before it.

        The text is kept, not copied: what follows later is known as soon as it is there.
        """
        for length in LEVELS:
            if length <= place:
                places = self.young.setdefault(hash(tuple(text[place - length : place])), [])
                places.append((text, place))
                del places[:-PLACES]
        self.count += 1
        if self.count > self.limit // 2:
            self.young, self.old, self.count = {}, self.young, 0

    def continuations(self, past: Sequence[int]) -> Iterator[tuple[float, list[int]]]:
        """As `Datastore.continuations`, of the texts that are remembered but the past itself."""
        for length, weight in LEVELS.items():
            texts = [text[place : place + DEPTH] for text, place in self._places(past, length)]
            for text in texts:
                yield weight / len(texts), text

    def matched(self, past: Sequence[int]) -> int:
        """As `Datastore.matched`."""
        return next((length for length in LEVELS if self._places(past, length)), 0)

    def _places(self, past: Sequence[int], length: int) -> list[Place]:
        """The places after the n-gram of a length with which the past ends, but its own."""
        if length > len(past):
            return []
        key = hash(tuple(past[-length:]))
        places = [*self.young.get(key, ()), *self.old.get(key, ())]
        return [(text, place) for text, place in places if text is not past]
