"""Text to ids and back: tokenizer, incremental detokenizer, chat template."""
