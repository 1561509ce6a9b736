"""What `compat.multi_process_adapter` is made of.

scheduler   the adapter for an engine's scheduler
worker      the adapter for each of its workers
engine      which engine an adapter belongs to, its arguments and its link
operations  LMCache's operations as chunks and blocks
requests    transfers and their results by request id
tensors     what the tensors of a KV cache say about its blocks
"""
