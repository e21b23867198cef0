#!/bin/sh
# The demo without a network: the demo target answers prompts, a block-parallel head learns from them, and
# every way of decoding runs on held-out prompts. A second run continues where the first one stopped.
set -eu
run=${1:-runs/demo}
target=assets/demo_target

drafthead data distill --target $target --prompts assets/demo_prompts/train.jsonl \
    --output "$run/distilled.jsonl" --max-new-tokens 160 --batch-size 64 --limit 1600
drafthead data distill --target $target --prompts assets/demo_prompts/validation.jsonl \
    --output "$run/validation.jsonl" --max-new-tokens 160 --batch-size 64 --limit 128
accelerate launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train/train_heads.py --config configs/demo_parallel.yaml \
    data.train="$run/distilled.jsonl" data.validation="$run/validation.jsonl" \
    train.output="$run/parallel"
drafthead compare --target $target --draft "$run/parallel" --draft assets/demo_draft \
    --prompts assets/demo_prompts/test.jsonl --output "$run/comparison" --limit 12 --rounds 3
