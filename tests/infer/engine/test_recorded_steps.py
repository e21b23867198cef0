"""Compiled steps as a GPU runs them: recorded once for each shape, then repeated.

A rehearsal stands for CUDA graphs, and the functions are not compiled, so this needs neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rehearsal import Rehearsal
from tiny import random_prompts

from drafthead.heads.cache_memory import CacheMemory
from drafthead.heads.drafting.drafter import Drafter
from drafthead.heads.graphs.compiled import Compiled, Graph, within
from drafthead.heads.graphs.recordings import Recordings
from drafthead.heads.target.target import Target
from drafthead.infer.decoder import Decoder
from drafthead.infer.engine.compiled_target import CompiledTarget
from drafthead.infer.measuring.oracle import OracleDecoder


@pytest.fixture
def rehearsal(monkeypatch) -> Rehearsal:
    """What every graph is recorded by, from now on."""
    stand_in = Rehearsal()

    def recorded(self: Compiled, arguments: Sequence[Any], key: str | None) -> tuple[Graph, Any]:
        function = within(self.around, self.function)
        graph = Recordings(function, self.dims.held, capture=stand_in)
        return graph, graph(*arguments)

    monkeypatch.setattr(Compiled, "_compiled", recorded)
    monkeypatch.setattr(Compiled, "_key", lambda *_: None)
    monkeypatch.setattr(CacheMemory, "where_recorded", lambda _: CacheMemory())
    return stand_in


def test_recorded_steps_decode_what_plain_decoding_does(
    drafter_name: str,
    target: Target,
    make_drafter: Callable[[str, Target], Drafter],
    rehearsal: Rehearsal,
) -> None:
    drafter = make_drafter(drafter_name, target)
    drafter.compile()
    prompts = random_prompts(5)
    compiled = Decoder(CompiledTarget(target), drafter)
    expected = OracleDecoder(target).generate(prompts, max_new_tokens=24).sequences
    assert compiled.generate(prompts, max_new_tokens=24).sequences == expected
    assert rehearsal.recorded > 0
