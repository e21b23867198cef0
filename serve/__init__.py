"""drafthead.serve: a server with OpenAI's endpoints and vLLM's metrics, around one decoder."""
