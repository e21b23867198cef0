"""A process that compiles JSON schemas on trial: its end costs nothing, whatever they would take.

Started as a file, so that it imports little. Reads JSON lines: first the tokens and the most bytes
that a grammar may take, then a grammar each. Answers a line each: what is wrong with it, or null.
"""

import json
import sys
from contextlib import suppress

from llguidance import LLMatcher, LLTokenizer


def limit_memory(most: int) -> None:
    """Let the process have so many bytes more than it has now."""
    with suppress(ImportError, OSError, ValueError):  # not on Windows and macOS
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + most, now + most))


def main() -> None:
    """Answer until the input ends."""
    first = json.loads(sys.stdin.readline())
    tokens = LLTokenizer(first["tokens"], n_vocab=first["n_vocab"], eos_token=first["ends"])
    limit_memory(first["most_bytes"])
    print("null", flush=True)
    for line in sys.stdin:
        matcher = LLMatcher(tokens, json.loads(line), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(matcher.get_error() if matcher.is_error() else None), flush=True)


if __name__ == "__main__":
    main()
