"""Low-rank adapters (LoRA) as PEFT writes them: their files, and those that are in memory."""
