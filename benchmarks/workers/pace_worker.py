"""AMD PACE's offline engine, one prompt at a time."""

import argparse
from importlib.metadata import version

import torch
from pace.llm import KVCacheType, LLMModel, SamplingConfig
from protocol import Job, until_end, work


def main() -> None:
    """Load the model and answer jobs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    options = parser.parse_args()
    model = LLMModel(options.target, kv_cache_type=KVCacheType.SLAB_POOL, disable_tqdm=True)
    ends = torch.tensor(model.get_config().eos_token_id).view(-1).tolist()

    def answer(job: Job) -> list[list[int]]:
        """The new tokens of the only prompt."""
        prompt = job.prompts[0]
        sampling = SamplingConfig(
            max_new_tokens=job.max_new_tokens,
            do_sample=job.temperature > 0,
            temperature=job.temperature or 1.0,
            top_p=job.top_p,
            seed=job.seed,
            eos_token_id=ends,
        )
        output = model.generate(torch.tensor([prompt]), sampling).output_token_ids
        return [until_end(output[0, len(prompt) :].tolist(), ends)]

    work(answer, version("amd-pace"), largest_batch=1)


main()
