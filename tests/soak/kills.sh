#!/usr/bin/env bash
# Kill ranks of a run at random moments. It must end with the weights of an undisturbed run.
#     tests/soak/kills.sh [KILLS] [STEPS]
set -euo pipefail
cd "$(dirname "$0")/../.."
kills=${1:-20}
folder=$(mktemp -d)
export ITERATIONS=${2:-3000} CHECKPOINT_EVERY=10 RESUME=auto RUN_ID=soak PRESET=demo DEVICE=cpu
export TRAIN_BATCH_TOKENS=1024 NUM_LAYERS=2 MODEL_DIM=32 MAX_WALLCLOCK_SECONDS=0 VAL_LOSS_EVERY=0
export MAX_VAL_TOKENS=1024 OMP_NUM_THREADS=1
train="python -m torch.distributed.run --standalone --nproc_per_node=2"
OUTPUT_DIR=$folder/calm $train train_gpt.py > "$folder/calm.log" 2>&1
OUTPUT_DIR=$folder/killed $train --max-restarts=$((kills + 5)) train_gpt.py > "$folder/killed.log" 2>&1 &
agent=$!
for i in $(seq "$kills"); do
    sleep $((RANDOM % 8)).$((RANDOM % 10))
    until ranks=$(pgrep -P $agent); do  # torchrun is restarting them
        kill -0 $agent || { echo "the run ended before kill $i: set more STEPS"; exit 1; }
        sleep 0.1
    done
    kill -9 "$(shuf -n 1 <<< "$ranks")" && echo "kill $i/$kills"
done
wait $agent || { echo "the run failed: see $folder/killed.log"; exit 1; }
cmp "$folder/calm/final_model.pt" "$folder/killed/final_model.pt"
echo "same weights after $kills kills and $(grep -c "^resume:.* step:" "$folder/killed.log") resumes"
