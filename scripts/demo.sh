#!/bin/sh
# The demo on a real model, SmolLM2-135M-Instruct: the head that is shipped answers a question, with prompt lookup
# beside it; another head is trained from nothing on answers that the model gives now; and all ways of decoding race
# on questions that none of them has seen. A second run continues where the first one stopped.
# Without a network: the demo on the small model of the tests.
set -eu
run=${1:-runs/smollm2}
prompts=assets/smollm2_prompts
shipped=assets/smollm2_eagle3

cat <<'PLAN'
What comes, and how long it took on two cores with AVX512-BF16 (7 minutes 33 seconds in all; without, half as long again):
  1  fetch SmolLM2-135M-Instruct, 98 MB                         2 s, with a fast network
  2  a first answer, not compiled                              33 s
  3  the model answers 112 prompts, compiled                   80 s
  4  a head learns from the answers                           131 s
  5  every way of decoding answers 6 questions, compiled      207 s
PLAN
step() { echo; echo "== $1"; }

step "1  fetch"
if ! drafthead fetch smollm2; then
    echo "SmolLM2 is not to be had, so this is the demo on the small model of the tests (make demo-offline)." >&2
    exec sh scripts/demo_offline.sh
fi
step "2  a first answer"
drafthead generate --target smollm2 --draft $shipped --draft lookup --max-new-tokens 128 \
    --prompt "How do I write a good commit message? Give me an example."
step "3  answers to learn from"
drafthead data distill --target smollm2 --prompts $prompts/train.jsonl --output "$run/distilled.jsonl" \
    --max-new-tokens 128 --batch-size 64 --limit 112 --compile
step "4  a head of your own"
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train/train_heads.py --config configs/demo_smollm2.yaml \
    data.train="$run/distilled.jsonl" data.validation=null data.validation_share=0.1 train.max_minutes=2 train.output="$run/eagle3"
step "5  the race"
drafthead compare --target smollm2 --draft $shipped --draft "$run/eagle3" --draft lookup --compile \
    --prompts $prompts/test.jsonl --output "$run/comparison" --limit 6 --rounds 1 --max-new-tokens 96
echo
echo "The table and the picture are in $run/comparison/. Now talk to it:"
echo "  drafthead chat --target smollm2 --draft $shipped --draft lookup --compile --show-drafts"
