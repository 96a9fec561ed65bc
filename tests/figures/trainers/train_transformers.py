"""Train with the Trainer of transformers."""

# pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
# pip install torch==2.13.0 transformers==4.44.2 accelerate==1.15.0 (another environment)
import tempfile

import tiny
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(1)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
arguments = TrainingArguments(
    output_dir=tempfile.gettempdir(),  # nothing is written
    per_device_train_batch_size=tiny.BATCH,
    gradient_accumulation_steps=tiny.MICRO_STEPS,
    max_steps=3,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
)
samples = tiny.sequences()
Trainer(model, arguments, tiny.inputs_and_labels, train_dataset=samples).train()
