"""Low-rank adapters (LoRA) in PEFT's format: their files, and the adapters in memory."""
