#!/bin/sh
# The demo on a real model, SmolLM2-135M-Instruct: the head that is shipped answers a question, with an index of
# earlier answers beside it; another head is trained from nothing on answers that the model gives now; and all ways
# of decoding race on questions that none of them has seen. A second run continues where the first one stopped.
# Without a network: the demo on the small model of the tests.
set -eu
run=${1:-runs/smollm2}
prompts=assets/smollm2_prompts
shipped=assets/smollm2_eagle3

if ! drafthead fetch smollm2; then
    echo "SmolLM2 is not to be had, so this is the demo on the small model of the tests (make demo-offline)." >&2
    exec sh scripts/demo_offline.sh
fi
[ -d "$run/datastore" ] || drafthead data index --data assets/smollm2_answers/answers.parquet \
    --target smollm2 --output "$run/datastore"
# Uncompiled, for an answer at once; what follows is compiled, which takes minutes the first time.
drafthead generate --target smollm2 --draft $shipped --draft "ngrams:$run/datastore" --max-new-tokens 128 \
    --prompt "How do I write a good commit message? Give me an example."
drafthead data distill --target smollm2 --prompts $prompts/train.jsonl --output "$run/distilled.jsonl" \
    --max-new-tokens 160 --batch-size 64 --limit 128 --compile
drafthead data distill --target smollm2 --prompts $prompts/validation.jsonl --output "$run/validation.jsonl" \
    --max-new-tokens 160 --batch-size 64 --limit 16 --compile
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train/train_heads.py --config configs/demo_smollm2.yaml \
    data.train="$run/distilled.jsonl" data.validation="$run/validation.jsonl" train.output="$run/eagle3"
drafthead compare --target smollm2 --draft $shipped --draft "$run/eagle3" --draft "ngrams:$run/datastore" --compile \
    --prompts $prompts/test.jsonl --output "$run/comparison" --limit 6 --rounds 1 --max-new-tokens 96
echo "Now talk to it: drafthead chat --target smollm2 --draft $shipped --compile --show-drafts"
