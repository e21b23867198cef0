"""vLLM's offline engine, plain or with a speculative configuration; no prefix is cached."""

import argparse
import json

import vllm
from protocol import Job, work


def main() -> None:
    """Load the model and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--speculative", help="JSON, such as the method and the head's folder")
    options = parser.parse_args()
    speculative = json.loads(options.speculative) if options.speculative else None
    model = vllm.LLM(
        options.target,
        dtype=options.dtype,
        max_model_len=2048,
        max_num_seqs=64,
        gpu_memory_utilization=0.2,  # of all memory, without a GPU too: others run beside it
        enable_prefix_caching=False,
        speculative_config=speculative,
    )

    def answer(job: Job) -> list[list[int]]:
        """The new tokens of each prompt."""
        sampling = vllm.SamplingParams(
            max_tokens=job.max_new_tokens,
            temperature=job.temperature,
            top_p=job.top_p,
            seed=job.seed,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in job.prompts]
        outputs = model.generate(prompts, sampling, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    work(answer, vllm.__version__)


if __name__ == "__main__":  # its engine is another process, which imports this file
    main()
