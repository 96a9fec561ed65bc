# Shrinks a record until it runs on a CPU, with all its techniques:
#     . tests/records/small.sh
#     ITERATIONS=10 PRESET=record2135 python tests/records/train_record.py
export DATA_PATH=data/datasets/demo_sp1024_caseops VOCAB_SIZE=1024
export TOKENIZER_PATH=data/tokenizers/demo_1024_bpe_caseops.model
export NUM_LAYERS=5 MODEL_DIM=144 NUM_HEADS=2 NUM_KV_HEADS=1 LOOP_FIRST=1 LOOP_LAYERS=1
export TRAIN_SEQ_LEN=96 TRAIN_BATCH_TOKENS=3072 VAL_BATCH_SIZE=6144 MAX_VAL_TOKENS=6144
export MAX_WALLCLOCK_SECONDS=0 WARMUP_STEPS=0 VAL_LOSS_EVERY=0 GPTQ_BATCHES=4
export MUON_MOMENTUM_WARMUP_STEPS=15 EMA_DECAY=0.95
export LORA_CONTEXT=96 LORA_DOCUMENTS=8 LORA_PHASE_DOCUMENTS=20
