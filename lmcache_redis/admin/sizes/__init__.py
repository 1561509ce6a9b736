"""How large a model's KV cache is, from its config.json alone.

config      reads a config.json, and finds the one of the text model
layers      a layer by what it keeps, in an engine with any number of ranks
families    which fields of a config say that, for each model type that is known
sizing      the size of a model: in Redis, on a link, what windows and states save
of_model    reads the size of a model from its config
shown       the size as JSON and as text
"""
