"""drafthead: plain, with a head, a draft model or lookup; compiled without --eager."""

import argparse
from importlib.metadata import version

from protocol import Job, work

from drafthead.infer import Decoder


def main() -> None:
    """Load the models and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head")
    parser.add_argument("--draft-model")
    parser.add_argument("--lookup", action="store_true")
    parser.add_argument("--ngrams")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    kinds = {"head": options.head, "model": options.draft_model, "ngrams": options.ngrams}
    draft = [f"{kind}:{name}" for kind, name in kinds.items() if name is not None]
    draft += ["lookup"] if options.lookup else []
    decoder = Decoder.from_pretrained(
        options.target,
        draft,
        dtype=options.dtype,
        compile=not options.eager,
    )

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
