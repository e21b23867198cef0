"""drafthead with its defaults, plain or with drafts by name."""

import argparse
from importlib.metadata import version

from protocol import Job, work

from drafthead.infer import Decoder


def main() -> None:
    """Load the models and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", action="append", default=[], help="Repeatable")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    decoder = Decoder.from_pretrained(options.target, options.draft, dtype=options.dtype)

    warm: set[tuple[int, float]] = set()

    def answer(job: Job) -> list[list[int]]:
        """The new tokens of each prompt."""
        kind = len(job.prompts), job.temperature
        if kind not in warm:  # in a batch that does not count
            decoder.warm_up(
                [len(job.prompts)],
                max_new_tokens=job.max_new_tokens,
                temperature=job.temperature,
                top_p=job.top_p,
            )
            warm.add(kind)
        return decoder.generate(
            job.prompts,
            max_new_tokens=job.max_new_tokens,
            temperature=job.temperature,
            top_p=job.top_p,
            seed=job.seed,
        ).sequences

    work(answer, version("drafthead"))


main()
