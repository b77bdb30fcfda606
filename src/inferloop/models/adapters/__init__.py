"""Low-rank adapters as PEFT writes them (https://huggingface.co/docs/peft): what a directory holds, and its checks."""
