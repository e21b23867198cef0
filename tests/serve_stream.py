"""What a server streams, for the tests of servers of every room."""

import json
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of a stream's events; the last one says that it is done, or what a response is."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]" or '"type": "response.' in lines[-1], lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line[6] == "{"]
