"""Which tokens a tokenizer's ids stand for, as a hash that files carry."""

import hashlib
from functools import lru_cache

from transformers import PreTrainedTokenizerBase


@lru_cache(maxsize=4)
def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of which token each id stands for, added tokens included."""
    digest = hashlib.blake2b(digest_size=8)
    for token, number in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{number}\t{token}\n".encode(errors="surrogatepass"))
    return digest.hexdigest()
