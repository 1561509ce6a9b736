"""How large a model's KV cache is, from its config.json alone.

config      reads a config.json, and finds the one of the text model
layers      the layers of a model by what each keeps, in an engine with any number of ranks
families    which fields of a config say that, for each model type that is known
stored      what Redis holds of a token and of a prompt: chunks, stripes, headers, keys
sizing      the size of a model: in a memory, on a link, what windows and states save
of_model    reads the size of a model from its config
"""
