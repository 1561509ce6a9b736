"""How large a model's KV cache is, from its config.json alone.

families    what each layer keeps, for each model type that is known
sizing      the size of a model: in Redis, on a link, what windows save; as JSON and as text
"""
