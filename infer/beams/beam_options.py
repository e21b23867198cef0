"""Beam search as a call asks for it: how many beams, and how answers of any length compare."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from drafthead.heads.errors import UserError
from drafthead.heads.sampling import SamplingConfig
from drafthead.infer.request.integers import integer_option, number_option

MOST_BEAMS = 8
EarlyStopping = bool | Literal["never"]
# What a call of beam search cannot have, in its options or in its config.
REFUSED = ("max_time", "stop_strings", "stopping_criteria", "streamer", "logprobs")


@dataclass(frozen=True)
class BeamOptions:
    """The options of beam search, under the names of `GenerationConfig`."""

    num_beams: int  # W, at least 2
    length_penalty: float = 1.0  # an answer's score is divided by its length to this power
    # When a prompt's search ends before the limit: with True as soon as there are W answers; with
    # False when a beam that ended now could not be one of the W best; with "never" when none that
    # ended later could.
    early_stopping: EarlyStopping = False
    num_return_sequences: int = 1  # answers to each prompt, the best ones

    def __post_init__(self) -> None:
        """Raises UserError for more beams than `MOST_BEAMS`, and for more answers than beams."""
        if self.num_beams > MOST_BEAMS:
            raise UserError(f"num_beams must be at most {MOST_BEAMS}, got {self.num_beams}")
        if not 1 <= self.num_return_sequences <= self.num_beams:
            raise UserError(
                f"num_return_sequences must be between 1 and num_beams={self.num_beams}, got "
                f"{self.num_return_sequences}"
            )


def read_beams(
    options: Mapping[str, Any], given: Mapping[str, Any], sampling: SamplingConfig
) -> BeamOptions | None:
    """The beams of a call, by its options, which win, and its config; None without beams.

    Raises UserError for what does not go with beam search, and for its options without beams.
    """
    merged = dict(given) | {name: value for name, value in options.items() if value is not None}
    beams = integer_option("num_beams", merged.get("num_beams", 1))
    if beams < 1:
        raise UserError(f"num_beams must be at least 1, got {beams}")
    if beams == 1:
        refuse_without_beams(merged)
        return None
    if not sampling.greedy:
        raise UserError("beams are not sampled: leave out num_beams, or temperature and do_sample")
    if merged.get("verifier", "auto") != "auto":
        raise UserError("num_beams does not go with a verifier: beam search is a rule of its own")
    for name in REFUSED:
        # A number is a setting, be it 0; no texts and no criteria are none.
        if (value := merged.get(name)) or isinstance(value, int):
            raise UserError(f"num_beams does not go with {name}: leave one of them out")
    stopping = merged.get("early_stopping", False)
    if not isinstance(stopping, bool) and stopping != "never":
        raise UserError(f'early_stopping must be True, False or "never", got {stopping!r}')
    return BeamOptions(
        beams,
        number_option("length_penalty", merged.get("length_penalty", 1.0)),
        stopping,
        integer_option("num_return_sequences", merged.get("num_return_sequences", 1)),
    )


def refuse_without_beams(merged: Mapping[str, Any]) -> None:
    """Raise UserError for an option of beam search that would have no effect."""
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if merged.get(name, neutral) != neutral:
            raise UserError(f"{name}={merged[name]!r} needs num_beams above 1")
