# SPDX-License-Identifier: Apache-2.0
"""The names of the originals. `originals` says what the fields mean."""

from __future__ import annotations

from tests.compat.originals import INTERNAL, Interface, Name

ITERATOR = "an iterator of all backends, with None for what is missing"
FOUND = "says whether there was a chunk"
DOCUMENTED = "As in LMCache {}, documented on 2026-02-09."

INTERFACES = (
    Interface(
        "IPC types",
        "lmcache.v1.multiprocess.custom_types",
        "lmcache_redis.compat.custom_types",
        DOCUMENTED.format("0.3.13"),
        (
            Name("CudaIPCWrapper", "(tensor)"),
            Name("CudaIPCWrapper.to_tensor", "()"),
            Name("CudaIPCWrapper.Serialize", "(obj)"),
            Name("CudaIPCWrapper.Deserialize", "(data)"),
            Name(
                "IPCCacheEngineKey",
                "(model_name, world_size, worker_id, chunk_hash)",
                different=(
                    "a hash or token ids; 1 to 255 workers, with `worker_id` among them; `salt` "
                    "is what else the KV of token ids depends on"
                ),
            ),
            Name(
                "IPCCacheEngineKey.from_int_hash",
                "(model_name, world_size, worker_id, chunk_hash)",
                different="eight bytes, as `ObjectKey.IntHash2Bytes`; undocumented",
            ),
            Name(
                "IPCCacheEngineKey.from_token_ids",
                ("(model_name, world_size, worker_id, token_ids, start=0, end=0, request_id='')"),
                different="of 0.3.15; undocumented",
            ),
            Name("IPCCacheEngineKey.no_worker_id_version", "()"),
            Name("IPCCacheEngineKey.Serialize", "(obj)"),
            Name("IPCCacheEngineKey.Deserialize", "(data)"),
            Name("KVCache"),
            Name("get_customized_encoder", "(type)"),
            Name("get_customized_decoder", "(type)"),
        ),
    ),
    Interface(
        "Distributed API",
        "lmcache.v1.distributed.api",
        "lmcache_redis.compat.distributed_api",
        DOCUMENTED.format("0.3.15"),
        (
            Name(
                "ObjectKey",
                "(chunk_hash, model_name, kv_rank)",
                different="a `chunk_hash` of 64 bytes or more is replaced by its digest of 32",
            ),
            Name(
                "ObjectKey.IntHash2Bytes",
                "(chunk_hash)",
                different="eight bytes, big-endian; the original has four",
            ),
            Name(
                "ObjectKey.Bytes2IntHash",
                "(chunk_hash)",
                different="one to eight bytes",
            ),
            Name(
                "ObjectKey.ComputeKVRank",
                "(world_size, global_rank, local_world_size, local_rank)",
                different="at most 255 workers; a node may have all of them",
            ),
            Name("MemoryLayoutDesc", "(shapes, dtypes)", different="has copies of both lists"),
            Name("ipc_keys_to_object_keys", "(ipc_keys)"),
        ),
    ),
    Interface(
        "Multi-process adapters",
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.multi_process_adapter",
        "lmcache_redis.compat.multi_process_adapter",
        (
            "As in vLLM 0.17.0; vLLM 0.27.1 to 0.33 have a `parallel_strategy` in place of "
            "`world_size` and `kv_rank`. Callers that join a host and a port name the agent's "
            "`ipc:///DIRECTORY/agent:5555` as host `ipc:///DIRECTORY/agent` and port 5555."
        ),
        (
            Name(
                "LoadStoreOp",
                "(block_ids, token_ids=None, block_hashes=None, start=0, end=0)",
                different=(
                    "frozen; token ids or hashes; of a part of a chunk nothing is stored or loaded"
                ),
            ),
            Name("LoadStoreOp.__len__", "()"),
            Name("utils", left_out="a module of LMCache's connectors"),
            Name("vllm_v1_adapter", left_out="see `lmcache_redis.integrations.vllm`"),
            Name(
                "LMCacheMPSchedulerAdapter",
                ("(server_url, context, model_name, world_size, kv_rank, vllm_block_size)"),
                different=(
                    "`ipc://` alone; `context` is not used; if engines of one model differ,"
                    " name each (`engine_id`, `$LMCACHE_REDIS_ENGINE_ID`); an agent with "
                    "other chunks than the first one counts as lost"
                ),
            ),
            Name(
                "LMCacheMPSchedulerAdapter.maybe_submit_lookup_request",
                "(request_id, block_hashes=None, token_ids=None)",
                different="what token ids do not say",
            ),
            Name(
                "LMCacheMPSchedulerAdapter.check_lookup_result",
                "(request_id)",
                different="0 if the agent is lost or the prompt shorter than a chunk",
            ),
            Name(
                "LMCacheMPSchedulerAdapter.num_blocks_per_chunk",
                "()",
                different="chunks are rounded up to whole blocks",
            ),
            Name("LMCacheMPSchedulerAdapter.cleanup_lookup_result", "(request_id)"),
            Name("LMCacheMPSchedulerAdapter.end_session", "(request_id)"),
            Name("LMCacheMPSchedulerAdapter.model_name"),
            Name("LMCacheMPSchedulerAdapter.world_size"),
            Name("LMCacheMPSchedulerAdapter.worker_id"),
            Name("LMCacheMPSchedulerAdapter.chunk_size"),
            Name("LMCacheMPSchedulerAdapter.blocks_in_chunk"),
            Name("LMCacheMPSchedulerAdapter.mq_client", left_out=INTERNAL),
            Name("LMCacheMPSchedulerAdapter.lookup_futures", left_out=INTERNAL),
            Name(
                "LMCacheMPSchedulerAdapter._create_key",
                "(token_ids, start=0, end=0, request_id=None)",
                left_out=INTERNAL,
            ),
            Name(
                "LMCacheMPSchedulerAdapter._create_hash_key",
                "(chunk_hash, request_id=None)",
                left_out=INTERNAL,
            ),
            Name(
                "LMCacheMPWorkerAdapter",
                ("(server_url, context, model_name, world_size, kv_rank, vllm_block_size)"),
                different=(
                    "`kv_rank` is the rank in `world_size`; several workers have one rank if their "
                    "KV is equal (MLA with tensor parallelism)"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.register_kv_caches",
                "(kv_caches)",
                different="waits `timeout_s`; DeviceError if the agent refuses",
            ),
            Name(
                "LMCacheMPWorkerAdapter.submit_store_request",
                "(request_id, op, event)",
                different="CPU memory needs no event",
            ),
            Name(
                "LMCacheMPWorkerAdapter.submit_retrieve_request",
                "(request_id, op, event)",
                different="CPU memory needs no event",
            ),
            Name(
                "LMCacheMPWorkerAdapter.batched_submit_store_requests",
                "(request_ids, ops, event)",
                different="CPU memory needs no event",
            ),
            Name(
                "LMCacheMPWorkerAdapter.batched_submit_retrieve_requests",
                "(request_ids, ops, event)",
                different="CPU memory needs no event",
            ),
            Name(
                "LMCacheMPWorkerAdapter.get_finished",
                "(finished_req_ids_from_engine)",
                different=(
                    "an id that consecutive calls repeat is reported once; a request with several "
                    "stores, when all have ended; LoadErrorsNotTaken if blocks that a load left "
                    "out were not asked for, see below"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.get_block_ids_with_load_errors",
                different="not in the original; call it after each `get_finished`",
            ),
            Name("LMCacheMPWorkerAdapter.num_blocks_per_chunk", "()"),
            Name("LMCacheMPWorkerAdapter.model_name"),
            Name("LMCacheMPWorkerAdapter.world_size"),
            Name("LMCacheMPWorkerAdapter.worker_id"),
            Name("LMCacheMPWorkerAdapter.kv_caches"),
            Name("LMCacheMPWorkerAdapter.blocks_in_chunk"),
            Name("LMCacheMPWorkerAdapter.mq_client", left_out=INTERNAL),
            Name(
                "LMCacheMPWorkerAdapter.instance_id",
                left_out="the agent knows a worker by its connection",
            ),
            Name("LMCacheMPWorkerAdapter.store_futures", left_out=INTERNAL),
            Name("LMCacheMPWorkerAdapter.retrieve_futures", left_out=INTERNAL),
            Name("LMCacheMPWorkerAdapter.finished_stores", left_out=INTERNAL),
            Name("LMCacheMPWorkerAdapter.previously_finished", left_out=INTERNAL),
            Name("LMCacheMPWorkerAdapter._update_and_get_finished_store", "()", left_out=INTERNAL),
            Name(
                "LMCacheMPWorkerAdapter._create_key",
                "(token_ids, start=0, end=0, request_id=None)",
                left_out=INTERNAL,
            ),
            Name(
                "LMCacheMPWorkerAdapter._create_hash_key",
                "(chunk_hash, request_id=None)",
                left_out=INTERNAL,
            ),
            Name("LMCacheMPWorkerAdapter.shutdown", "()"),
        ),
    ),
    Interface(
        "V1 protocol",
        "lmcache.v1.protocol",
        "lmcache_redis.compat.protocol",
        DOCUMENTED.format("0.3.13"),
        (
            Name("ClientCommand"),
            Name("ServerReturnCode"),
            Name(
                "RemoteMetadata",
                "(length, shapes, dtypes, fmt)",
                different=(
                    "[its own encoding](value-format.md#remotemetadata), a part of every "
                    "value, where its fields have to agree; 0 to 8 groups"
                ),
            ),
            Name("RemoteMetadata.serialize", "()"),
            Name("RemoteMetadata.serialize_into", "(buffer)"),
            Name("RemoteMetadata.deserialize", "(s)"),
            Name(
                "ClientMetaMessage",
                "(command, key, length, fmt, dtype, shape, location=None)",
                different="the key may be text",
            ),
            Name("ClientMetaMessage.serialize", "()"),
            Name("ClientMetaMessage.deserialize", "(s)"),
            Name("ClientMetaMessage.packlength", "()"),
            Name("ServerMetaMessage", "(code, length, fmt, dtype, shape, location=None)"),
            Name("ServerMetaMessage.serialize", "()"),
            Name("ServerMetaMessage.deserialize", "(s)"),
            Name("ServerMetaMessage.packlength", "()"),
            Name(
                "init_remote_metadata_info",
                "(num_groups)",
                different="0 to 8 groups, for `get_remote_metadata_bytes` alone",
            ),
            Name(
                "get_remote_metadata_bytes",
                "()",
                different="56 for one group, 96 for two",
            ),
            Name("DTYPE_TO_INT"),
            Name("INT_TO_DTYPE"),
            Name("LOCATION_TO_INT"),
            Name("INT_TO_LOCATION"),
            Name("MAX_KEY_LENGTH"),
            Name("MemoryFormat"),
            Name(
                "CacheEngineKey",
                ("(model_name, world_size, worker_id, chunk_hash, dtype, request_configs={})"),
                different=(
                    "the fields of 0.5.6 or of earlier versions (`fmt` first), in order or by name"
                ),
            ),
            Name("CacheEngineKey.to_string", "()"),
            Name("CacheEngineKey.from_string", "(s)"),
            Name("CacheEngineKey.split_layers", "(num_layers)"),
            Name("CacheEngineKey.get_first_layer", "()"),
            Name("CacheEngineKey.with_new_worker_id", "(new_worker_id)"),
            Name(
                "LayerCacheEngineKey",
                (
                    "(model_name, world_size, worker_id, chunk_hash, dtype, "
                    "request_configs={}, layer_id=0)"
                ),
                different="as `CacheEngineKey`",
            ),
            Name("parse_cache_key", "(key_str)"),
        ),
    ),
    Interface(
        "Storage backends",
        "lmcache.storage_backend",
        "lmcache_redis.compat.storage_backend",
        (
            "As in LMCache 0.3.1, whose four modules are one here. A hash of over 63 bytes stands "
            "in the name of a chunk as its digest."
        ),
        (
            Name(
                "LMCBackendInterface",
                "(dst_device='cuda')",
                different="no keys with tags; ConfigError for a device that the machine has not",
            ),
            Name("LMCBackendInterface.batched_get", "(keys)", different=ITERATOR),
            Name("LMCBackendInterface.batched_put", "(keys_and_chunks, blocking=True)"),
            Name("LMCBackendInterface.close", "()"),
            Name("LMCBackendInterface.contains", "(key)"),
            Name("LMCBackendInterface.get", "(key)"),
            Name(
                "LMCBackendInterface.put",
                "(key, kv_chunk, blocking=True)",
                different="a server or disk that fails raises nothing",
            ),
            Name(
                "LMCHybridBackend",
                "(config, metadata, mpool_metadata, dst_device='cuda')",
                different="memory gets a chunk of the server at its first `get`, not at the start",
            ),
            Name("LMCHybridBackend.batched_get", "(keys)", different=ITERATOR),
            Name("LMCHybridBackend.close", "()"),
            Name("LMCHybridBackend.contains", "(key)"),
            Name("LMCHybridBackend.get", "(key)"),
            Name("LMCHybridBackend.put", "(key, value, blocking=True)"),
            Name(
                "LMCLocalBackend",
                "(config, metadata, dst_device='cuda')",
                different="`local_device='cuda'` keeps chunks in host memory",
            ),
            Name("LMCLocalBackend.close", "()"),
            Name("LMCLocalBackend.contains", "(key)"),
            Name("LMCLocalBackend.get", "(key)"),
            Name(
                "LMCLocalBackend.put",
                "(key, kv_chunk, blocking=True)",
                different="a tensor, no nested tuples",
            ),
            Name("LMCLocalBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCLocalBackend.put_nonblocking", "(key, kv_chunk)"),
            Name("LMCLocalBackend.put_worker", "()", left_out=INTERNAL),
            Name("LMCLocalBackend.remove", "(key)", different=FOUND),
            Name("LMCLocalDiskBackend", "(config, metadata, dst_device='cuda')"),
            Name("LMCLocalDiskBackend.buffer_sweeper", "()", left_out=INTERNAL),
            Name("LMCLocalDiskBackend.close", "()"),
            Name("LMCLocalDiskBackend.contains", "(key)"),
            Name("LMCLocalDiskBackend.get", "(key)"),
            Name(
                "LMCLocalDiskBackend.put",
                "(key, kv_chunk, blocking=True)",
                different="a tensor, no nested tuples",
            ),
            Name("LMCLocalDiskBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCLocalDiskBackend.put_nonblocking", "(key, kv_chunk)"),
            Name("LMCLocalDiskBackend.put_worker", "()", left_out=INTERNAL),
            Name("LMCLocalDiskBackend.remove", "(key)", different=FOUND),
            Name("LocalBackendEndSignal", "()", left_out=INTERNAL),
            Name(
                "save_disk",
                "(path, kv_chunk)",
                left_out=(
                    "`safetensors.torch.save_file({'kv_chunk': kv_chunk.contiguous()}, "
                    "path)` does the same"
                ),
            ),
            Name(
                "LMCRemoteBackend",
                "(config, metadata, dst_device='cuda')",
                different=(
                    "`remote_url` is of Redis or Valkey, not `lm://`; `remote_serde` does "
                    "not compress, `LMCACHE_REDIS_COMPRESS` does"
                ),
            ),
            Name("LMCRemoteBackend.close", "()"),
            Name("LMCRemoteBackend.contains", "(key)"),
            Name("LMCRemoteBackend.get", "(key)"),
            Name(
                "LMCRemoteBackend.list",
                "()",
                different="a key of a hash of over 63 bytes has its digest",
            ),
            Name("LMCRemoteBackend.put", "(key, kv_chunk, blocking=True)"),
            Name("LMCRemoteBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCRemoteBackend.put_worker", "()", left_out=INTERNAL),
            Name("LMCPipelinedRemoteBackend", "(config, metadata, dst_device='cuda')"),
            Name("LMCPipelinedRemoteBackend.batched_get", "(keys)", different=ITERATOR),
            Name("LMCPipelinedRemoteBackend.close", "()"),
            Name("LMCPipelinedRemoteBackend.deserialize_worker", "()", left_out=INTERNAL),
            Name("LMCPipelinedRemoteBackend.network_worker", "()", left_out=INTERNAL),
            Name("RemoteBackendEndSignal", "()", left_out=INTERNAL),
        ),
    ),
    Interface(
        "Settings of the storage backends",
        "lmcache.config",
        "lmcache_redis.compat.config",
        "",
        (
            Name("LMCacheEngineConfig", different="keywords, with LMCache's defaults"),
            Name(
                "LMCacheEngineConfig.from_defaults", different="keywords, with LMCache's defaults"
            ),
            Name("LMCacheEngineMetadata", different="plain data"),
            Name("LMCacheMemPoolMetadata", different="plain data"),
        ),
    ),
)
