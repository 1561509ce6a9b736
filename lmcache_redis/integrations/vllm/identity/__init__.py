# SPDX-License-Identifier: Apache-2.0
"""What decides the bytes of an engine's KV cache, besides its layout: docs/internals/identity.md.

engine_identity  the identity of a worker's KV cache, as pairs of text
pairs            the settings of vLLM that are in each pair
advice           what would have to change for engines that differ in one
weights          a digest of the model's files, or the operator's name for them
files            whether files have changed since vLLM read them
probe            how the layers' backends pack K and V
heads            which bytes belong to which head, for engines of several TP sizes
versions         what computes K and V, for engines of several versions
lora             a digest of a request's adapter, which is in the names of its chunks
"""
