"""Which messages that a model has written in a user's place are worth an answer."""

import re

from drafthead.train.prompts.near_duplicates import NearDuplicates, words_of

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
        """Why a message is dropped; None if it is kept, and then remembered."""
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
