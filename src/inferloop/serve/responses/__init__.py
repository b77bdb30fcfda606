"""/v1/responses: OpenAI's newer form of a conversation, as one more dialect of the same endpoint."""
