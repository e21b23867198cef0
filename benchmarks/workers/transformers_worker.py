"""transformers' `model.generate`, plain, with prompt lookup or with an assistant model."""

import argparse

import torch
import transformers
from protocol import Job, until_end, work
from transformers import AutoModelForCausalLM, set_seed


def main() -> None:
    """Load the models and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--assistant")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lookup", action="store_true")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype)
    speculation = {"prompt_lookup_num_tokens": 4} if options.lookup else {}
    if options.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(options.assistant, dtype=options.dtype)
        speculation = {"assistant_model": assistant}
    ends = torch.tensor(model.generation_config.eos_token_id).view(-1).tolist()

    def answer(job: Job) -> list[list[int]]:
        """The new tokens of each prompt."""
        set_seed(job.seed)
        longest = max(map(len, job.prompts))
        padding = [longest - len(prompt) for prompt in job.prompts]
        drawn = {"temperature": job.temperature, "top_p": job.top_p, "top_k": 0}
        output = model.generate(
            torch.tensor([[0] * n + p for n, p in zip(padding, job.prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n in padding]),
            max_new_tokens=job.max_new_tokens,
            do_sample=job.temperature > 0,
            pad_token_id=0,
            **(drawn if job.temperature else {}),
            **speculation,
        )
        return [until_end(row, ends) for row in output[:, longest:].tolist()]

    work(answer, transformers.__version__, 1 if speculation else 2**20)


main()
