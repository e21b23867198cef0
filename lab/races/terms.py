"""The terms of a race; this file imports no torch, so that the command line can list options."""

from typing import Annotated

from pydantic import Field

from drafthead.core.settings import (
    AtLeastOne,
    BatchSize,
    InShell,
    MaxNewTokens,
    RuleName,
    Seed,
    Temperature,
    TopP,
    settings,
)

Temperatures = Annotated[
    tuple[Temperature, ...],
    InShell("--temperature"),
    Field(min_length=1, description="0 is greedy; repeatable. 0 by default."),
]


@settings
class RaceTerms:
    """The prompts that everybody decodes, and how often."""

    temperatures: Temperatures = (0.0,)
    max_new_tokens: MaxNewTokens = 128
    rounds: Annotated[AtLeastOne, Field(description="Times that every prompt is decoded.")] = 3
    verifier: Annotated[RuleName, InShell("--rule")] = "auto"
    seed: Seed = 0
    batch_size: BatchSize = 1
    top_p: TopP = 1.0
