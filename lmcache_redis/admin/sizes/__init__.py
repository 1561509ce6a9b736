"""How large a model's KV cache is, from its config.json alone.

layers      a layer by what it keeps, in an engine with any number of ranks
families    which fields of a config say that, for each model type that is known
sizing      the size of a model: in Redis, on a link, what windows and states save
shown       the size as JSON and as text
"""
