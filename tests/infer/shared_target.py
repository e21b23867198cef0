"""A process of `test_shared_target.py`: `torchrun --nproc-per-node 2 shared_target.py MODEL`.

Its planner chooses at random, otherwise than that of the other process.
"""

import random
import sys
from pathlib import Path

import torch.distributed as dist

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "benchmarks")]
from random_models import random_head  # noqa: E402
from tiny import random_prompts  # noqa: E402

from drafthead.core.errors import UserError  # noqa: E402
from drafthead.core.target.any_target import load_decoder_only  # noqa: E402
from drafthead.core.target.placement import Placement  # noqa: E402
from drafthead.core.trees.guesses import Proposal  # noqa: E402
from drafthead.heads.families.head_drafter import drafter_for  # noqa: E402
from drafthead.infer import Decoder  # noqa: E402
from drafthead.infer.planning.planner import PlannedDecoding, Propose  # noqa: E402

folder = sys.argv[1]
target = load_decoder_only(folder, placement=Placement("tensor"))
chance = random.Random(dist.get_rank())


def by_chance(self: PlannedDecoding, propose: Propose, ahead: bool = False) -> Proposal | None:
    """A draft of any size, or none."""
    size = chance.choice(self.plan.sizes)
    self.made = [(size, False)]
    proposal = None if size is None else propose(size)
    return proposal if size is None or size.levels else proposal.best(size.nodes)


PlannedDecoding.draft = by_chance
PlannedDecoding.learn = lambda *_: None
prompts, ask = random_prompts(3), {"max_new_tokens": 24}
expected = Decoder(load_decoder_only(folder)).generate(prompts, **ask).sequences
for drafter in ("lookup", drafter_for(random_head("eagle3", target), target)):
    found = Decoder.from_pretrained(target, draft=drafter).generate(prompts, **ask)
    assert found.sequences == expected
    assert found.stats.verified_nodes > found.stats.steps, "it has drafted"
try:
    Decoder.from_pretrained(target, draft="lookup").generate(prompts, max_time=5)
except UserError as error:
    assert "max_time" in str(error)
else:
    raise AssertionError("the clock ends answers in one process only")
print("the same text")
