"""A filter of messages that a model wrote in a user's place: are they worth an answer?

Texts say nearly the same that have most runs of three words in common: Broder, On the resemblance
and containment of documents, 1997. Which texts to compare is found by prefix filtering: Chaudhuri,
Ganti and Kaushik, A primitive operator for similarity joins in data cleaning, 2006.
"""

import re
from collections import defaultdict

LEAST_WORDS = 3
GREATEST_REPEATED = 0.3  # share of runs of three words that occurred before in the message
NEARLY_SAME = 0.7  # Jaccard similarity
# Control text of common chat templates. A model may have learnt those of others than its own.
TEMPLATE_TEXT = re.compile(
    r"<\|[^|<>\s]+\|>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|^\s*(?:###\s*)?(?:user|human|assistant|system)\s*:",
    re.IGNORECASE | re.MULTILINE,
)


class MessageFilter:
    """Keeps messages that are whole, plain, and unlike those kept before."""

    def __init__(self) -> None:
        self.kept = NearDuplicates(NEARLY_SAME)
        self.exact: set[str] = set()

    def problem(self, text: str) -> str | None:
        """Say why a message is dropped; None if it is kept, and then remembered."""
        words = words_of(text)
        if TEMPLATE_TEXT.search(text):
            return "text of a chat template inside"
        if "\ufffd" in text:
            return "broken characters"
        if len(words) < LEAST_WORDS:
            return f"fewer than {LEAST_WORDS} words"
        if repeated_share(words) > GREATEST_REPEATED:
            return "repeats itself"
        plain = " ".join(words)
        if plain in self.exact:
            return "same as another"
        if not self.kept.add(text):
            return "nearly the same as another"
        self.exact.add(plain)
        return None


def repeated_share(words: list[str]) -> float:
    """The share of runs of three words that occurred before: 1 of 4 in "a b c a b c"."""
    runs = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


WORD = re.compile(r"\w+")
SHINGLE = 3  # words


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return WORD.findall(text.casefold())


def shingles(text: str) -> set[str]:
    """All runs of three words; the whole text if it is shorter.

    "How do I sort a list?" has the runs "how do i", "do i sort", "i sort a" and "sort a list".
    """
    words = words_of(text)
    return {" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


class NearDuplicates:
    """Texts seen so far; tells whether another one is nearly the same as one of them."""

    def __init__(self, threshold: float):
        """`threshold`: the Jaccard similarity of the shingles from which texts are the same."""
        self.threshold = threshold
        self.seen: list[set[str]] = []  # shingles
        self.places: defaultdict[str, list[int]] = defaultdict(list)  # in `seen`, by shingle

    def add(self, text: str) -> bool:
        """Tell whether the text is new; it is remembered then.

        A text that is nearly the same lacks few of these runs, so it has one of any few more: of
        the rarest, which few texts have.
        """
        runs = shingles(text)
        few = len(runs) - int(self.threshold * len(runs)) + 1
        rarest = sorted(runs, key=lambda run: len(self.places.get(run, ())))[:few]
        others = {place for run in rarest for place in self.places.get(run, ())}
        if any(jaccard(runs, self.seen[place]) >= self.threshold for place in others):
            return False
        for run in runs:
            self.places[run].append(len(self.seen))
        self.seen.append(runs)
        return True


def jaccard(one: set[str], other: set[str]) -> float:
    """The share of common members among all members of two sets."""
    return len(one & other) / len(one | other)
