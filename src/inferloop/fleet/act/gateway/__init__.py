"""The front door of a service: the OpenAI API over many replicas. Bytes pass through; tokens are never parsed."""
