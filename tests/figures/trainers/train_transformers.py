"""Train with the Trainer of transformers; the argument is llama or gpt2, which it tells apart."""

# pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
# pip install torch==2.13.0 transformers==4.44.2 accelerate==1.15.0 (another environment)
import sys
import tempfile

import tiny
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(1)
sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(sys.argv[1], **sizes))
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),  # nothing is written
    per_device_train_batch_size=tiny.BATCH,
    gradient_accumulation_steps=tiny.MICRO_STEPS,
    **{"max_steps": 3, "save_strategy": "no", "report_to": [], "use_cpu": True},
)
Trainer(model, arguments, tiny.inputs_and_labels, train_dataset=tiny.sequences()).train()
