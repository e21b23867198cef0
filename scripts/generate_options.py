"""The options of `drafthead generate`, by what they are about."""

from typing import Annotated

import typer

# What is asked, and when the answer ends.
Prompt = Annotated[str | None, typer.Option(help="The user's message; by default standard input.")]
MinNewTokens = Annotated[int | None, typer.Option(help="Fewest new tokens.")]
StopTexts = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")
]
MaxTime = Annotated[
    float | None, typer.Option(help="Seconds after which the answer ends as it is.")
]
NumAnswers = Annotated[
    int,
    typer.Option(help="Answers; several need a temperature above 0 or as many --num-beams."),
]
NumBeams = Annotated[
    int,
    typer.Option(
        help="Beam search with up to 8 beams, printed at its end with the answer's score; 1 is off."
    ),
]

# How tokens are chosen.
MinP = Annotated[
    float,
    typer.Option(
        help="Keep tokens with at least this share of the best one's probability; 0 keeps all."
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(help="Above 1: tokens of prompt and answer become less probable; 1 is off."),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(help="Subtracted from a token's logit for each time it occurs in the answer."),
]
PresencePenalty = Annotated[
    float,
    typer.Option(help="Subtracted from the logit of every token that occurs in the answer."),
]
NoRepeatNgramSize = Annotated[
    int | None, typer.Option(help="No n-gram of this size is repeated; 0 is off.")
]

# Which drafted tokens are accepted.
VerifierName = Annotated[
    str,
    typer.Option(
        help="auto, greedy, rejection, traversal, match are lossless; typical and lenient, and "
        "at temperature 0 top_k and distance, are lossy: they change the output."
    ),
]
TypicalEpsilon = Annotated[
    float | None,
    typer.Option(help="With --verifier typical: highest threshold; by default 0.09."),
]
TypicalDelta = Annotated[
    float | None,
    typer.Option(help="With --verifier typical: threshold by entropy; by default 0.3."),
]
Lenience = Annotated[
    float | None,
    typer.Option(
        help="With --verifier lenient: tokens become up to 1 / lenience times as probable as "
        "they should be; by default 0.5."
    ),
]
AcceptTop = Annotated[
    int | None,
    typer.Option(
        help="With the lossy --verifier top_k: drafted tokens stay when they are among so many "
        "most probable ones; by default 2, and 1 is exact."
    ),
]
AcceptDistance = Annotated[
    int | None,
    typer.Option(
        help="With the lossy --verifier distance, for tokens whose numbers are an order, such "
        "as pixels, and senseless for text: how far a drafted number may lie from the most "
        "probable one; by default 2, and 0 is exact."
    ),
]
MinBlock = Annotated[
    int | None,
    typer.Option(
        help="With --verifier top_k or distance: tokens that a step adds at least, wrong ones "
        "too; by default 1."
    ),
]
DraftTemperature = Annotated[
    float | None,
    typer.Option(help="Temperature of sampled drafts; changes speed, never the distribution."),
]

# What is printed.
LogprobTokens = Annotated[
    int | None,
    typer.Option(
        help="Print each token's log-probability, and so many of the target's most probable "
        "tokens beside it; 0 for none."
    ),
]
