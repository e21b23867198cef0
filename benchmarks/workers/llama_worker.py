"""llama.cpp through llama-cpp-python, one prompt at a time, plain or with prompt lookup."""

import argparse
import os

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import Job, work


def main() -> None:
    """Load the GGUF file and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", required=True)
    parser.add_argument("--lookup", action="store_true")
    options = parser.parse_args()
    model = llama_cpp.Llama(
        options.file,
        n_ctx=2048,
        n_threads=os.cpu_count(),
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=4) if options.lookup else None,
        logits_all=options.lookup,
        verbose=False,
    )
    ends = {model.token_eos(), llama_cpp.llama_vocab_eot(model._model.vocab)}

    def answer(job: Job) -> list[list[int]]:
        """The new tokens of the only prompt."""
        model.reset()
        model.set_seed(job.seed)
        tokens: list[int] = []
        for token in model.generate(
            job.prompts[0], top_k=0, top_p=job.top_p, min_p=0, temp=job.temperature
        ):
            tokens.append(token)
            if token in ends or len(tokens) == job.max_new_tokens:
                break
        return [tokens]

    work(answer, llama_cpp.__version__, largest_batch=1)


main()
