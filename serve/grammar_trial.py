"""A process that compiles grammars on trial, so that it can be ended: one a line, as JSON.

Started as a file, so that it imports little. Its first line says that it is ready, the others what
is wrong with a grammar, or nothing.
"""

import json
import resource
import sys

from llguidance import LLMatcher, LLTokenizer

if __name__ == "__main__":
    tokens = LLTokenizer("byte")
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    print("ready", flush=True)
    for line in sys.stdin:
        matcher = LLMatcher(tokens, json.loads(line), log_level=0)
        error = matcher.get_error()
        matcher.compute_bitmask()
        print(json.dumps(error), flush=True)
