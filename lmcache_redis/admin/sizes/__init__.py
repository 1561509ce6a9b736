# SPDX-License-Identifier: Apache-2.0
"""How large a model's KV cache is, from its config.json alone.

configs     where the config.json is: named by a path, or in the local Hugging Face cache
families    what each layer keeps, for each model type that is known
sizing      the size of a model: in Redis, on a link, what windows save
shown       the same as JSON and as text
"""
