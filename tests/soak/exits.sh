#!/usr/bin/env bash
# Start many short runs of four gloo ranks. Each must end well.
#     tests/soak/exits.sh [RUNS]
cd "$(dirname "$0")/../.." || exit
export PRESET=demo DEVICE=cpu OMP_NUM_THREADS=1 ITERATIONS=2 WARMUP_STEPS=0 MAX_VAL_TOKENS=1024
OUTPUT_DIR=$(mktemp -d)
export OUTPUT_DIR
failures=0
for i in $(seq "${1:-30}"); do
    RUN_ID=$i timeout 240 python -m torch.distributed.run --standalone --nproc_per_node=4 train_gpt.py \
        > "$OUTPUT_DIR/$i.out" 2>&1 && echo "run $i: good" || { echo "run $i: $OUTPUT_DIR/$i.out"; ((failures++)); }
done
echo "failures: $failures"
exit $((failures > 0))
