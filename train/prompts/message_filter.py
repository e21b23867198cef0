"""Which messages that a model has written in a user's place are worth an answer.

Texts that say nearly the same are found by MinHash and locality-sensitive hashing: Broder, On the
resemblance and containment of documents, 1997; banding as in Leskovec, Rajaraman and Ullman, Mining
of Massive Datasets, section 3.4.
"""

import hashlib
import re
from collections import defaultdict

import numpy as np

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
BANDS, ROWS = 20, 4  # two texts of similarity s are compared with probability 1 - (1 - s^4)^20


def words_of(text: str) -> list[str]:
    """The words of a text in lower case, without punctuation."""
    return WORD.findall(text.casefold())


def shingles(text: str) -> np.ndarray:
    """64-bit digests, sorted, of all runs of three words; of the whole text if it is shorter.

    "How do I sort a list?" has the runs "how do i", "do i sort", "i sort a" and "sort a list".
    """
    words = words_of(text)
    runs = {" ".join(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}
    digests = [hashlib.blake2b(run.encode(), digest_size=8).digest() for run in runs]
    return np.sort(np.frombuffer(b"".join(digests), dtype=np.uint64))


class NearDuplicates:
    """Texts seen so far; tells whether another one is nearly the same as one of them."""

    def __init__(self, threshold: float):
        """`threshold`: the Jaccard similarity of the shingles from which texts are the same."""
        self.threshold = threshold
        self.seen: list[np.ndarray] = []  # shingles
        self.buckets: defaultdict[bytes, list[int]] = defaultdict(list)  # places in `seen`
        random = np.random.default_rng(0)
        # Odd factors: multiplication by them permutes the 64-bit numbers.
        self.factors = random.integers(2**63, size=BANDS * ROWS, dtype=np.uint64) * 2 + 1
        self.offsets = random.integers(2**63, size=BANDS * ROWS, dtype=np.uint64)

    def add(self, text: str) -> bool:
        """Tell whether the text is new; it is remembered then."""
        runs = shingles(text)
        keys = self._keys(runs)
        others = {place for key in keys for place in self.buckets.get(key, ())}
        if any(jaccard(runs, self.seen[place]) >= self.threshold for place in others):
            return False
        for key in keys:
            self.buckets[key].append(len(self.seen))
        self.seen.append(runs)
        return True

    def _keys(self, runs: np.ndarray) -> list[bytes]:
        """One key for each band: equal keys of the same band make two texts candidates."""
        hashed = runs[:, None] * self.factors + self.offsets  # [shingles, BANDS * ROWS], mod 2^64
        bands = hashed.min(axis=0).reshape(BANDS, ROWS)
        return [bytes([number]) + band.tobytes() for number, band in enumerate(bands)]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """The share of common members among all members of two sets, given as sorted arrays."""
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)
