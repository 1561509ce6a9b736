"""The names of the originals. `originals` says what the fields mean."""

from __future__ import annotations

from tests.compat.originals import Interface, Name

_THREADS = "an internal of LMCache's threads, which do not exist here"
_LINK = "an internal: the link to the agent has the socket and the calls in flight"
_KEYS = "an internal: a key is made where the message is"
_FINISHED = "an internal of `get_finished`"
_LMCACHE = "The original is LMCache's as documented on 2026-02-09."
_TUPLES = "a tensor; nested tuples, of which the original's text speaks, raise FormatError"

INTERFACES = (
    Interface(
        "IPC types",
        "lmcache.v1.multiprocess.custom_types",
        "lmcache_redis.compat.custom_types",
        _LMCACHE,
        (
            Name(
                "CudaIPCWrapper",
                "(tensor)",
                different="raises DeviceError for a tensor that cannot be shared",
            ),
            Name(
                "CudaIPCWrapper.to_tensor",
                "()",
                different=(
                    "in the exporting process it is the exported tensor, which CUDA would "
                    "refuse to open there"
                ),
            ),
            Name("CudaIPCWrapper.Serialize", "(obj)", different="a struct of fields, not pickle"),
            Name(
                "CudaIPCWrapper.Deserialize",
                "(data)",
                different="a struct of fields, which are validated: decoding executes no code",
            ),
            Name(
                "IPCCacheEngineKey",
                "(model_name, world_size, worker_id, chunk_hash)",
                different=(
                    "exactly one of a hash and token ids; 1 to 63 bytes of hash, 1 to 255 workers "
                    "and a rank below that; `salt` stands for what else the KV of token ids "
                    "depends on; keys of all workers (None) sort first, where the original cannot "
                    "compare them; a msgspec Struct, which `dataclasses.replace`, `asdict` and "
                    "`fields` take; a change raises AttributeError, not its subclass "
                    "FrozenInstanceError"
                ),
            ),
            Name("IPCCacheEngineKey.no_worker_id_version", "()"),
            Name("IPCCacheEngineKey.Serialize", "(obj)", different="msgpack, not pickle"),
            Name(
                "IPCCacheEngineKey.Deserialize",
                "(data)",
                different="msgpack, not pickle; a malformed key raises FormatError",
            ),
            Name("KVCache"),
            Name(
                "get_customized_encoder",
                "(type)",
                different=(
                    "no msgspec Encoder but an object with `encode` alone, because msgspec cannot "
                    "encode keys as extensions; the type may be left out"
                ),
            ),
            Name(
                "get_customized_decoder",
                "(type)",
                different=(
                    "no msgspec Decoder but an object with `decode` alone; malformed bytes raise "
                    "FormatError; without a type, extensions decode to their Python types and "
                    "tuples to lists"
                ),
            ),
        ),
    ),
    Interface(
        "Distributed API",
        "lmcache.v1.distributed.api",
        "lmcache_redis.compat.distributed_api",
        _LMCACHE,
        (
            Name(
                "ObjectKey",
                "(chunk_hash, model_name, kv_rank)",
                different=(
                    "1 to 63 bytes of hash; checked; ordered; a msgspec Struct, as "
                    "`IPCCacheEngineKey`"
                ),
            ),
            Name(
                "ObjectKey.IntHash2Bytes",
                "(chunk_hash)",
                different=(
                    "eight bytes, big-endian, where the original has four; larger hashes are "
                    "refused, not truncated"
                ),
            ),
            Name("ObjectKey.Bytes2IntHash", "(chunk_hash)", different="one to eight bytes"),
            Name(
                "ObjectKey.ComputeKVRank",
                "(world_size, global_rank, local_world_size, local_rank)",
                different=(
                    "FormatError for more than 255 workers and for a rank outside its world; a "
                    "node may have the whole world, where the original asks for at most 8 workers"
                ),
            ),
            Name(
                "MemoryLayoutDesc",
                "(shapes, dtypes)",
                different=(
                    "FormatError for lists of unequal length, for a size that is negative or no "
                    "integer, and for a dtype that is not torch's"
                ),
            ),
            Name("ipc_keys_to_object_keys", "(ipc_keys)"),
        ),
    ),
    Interface(
        "Multi-process adapters",
        "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_integration.multi_process_adapter",
        "lmcache_redis.compat.multi_process_adapter",
        "The original is vLLM's, from an undated copy of its documentation that is older than vLLM "
        "0.27.1. The adapters of vLLM 0.27.1 to 0.33 have a `parallel_strategy` in place of "
        "`world_size` and `kv_rank`, so their callers change more than an import.",
        (
            Name(
                "LoadStoreOp",
                "(block_ids, token_ids=None, block_hashes=None, start=0, end=0)",
                different=(
                    "frozen, and checked when it is made: either token ids or hashes, as many "
                    "hashes as blocks, `start` and `end` within the tokens (by default no tokens, "
                    "as in the original); where it begins or ends within a chunk, only whole "
                    "chunks are stored and loaded"
                ),
            ),
            Name("LoadStoreOp.__len__", "()"),
            Name("utils", left_out="a module of LMCache's connectors"),
            Name(
                "vllm_v1_adapter",
                left_out="the connector here is `lmcache_redis.integrations.vllm`",
            ),
            Name(
                "LMCacheMPSchedulerAdapter",
                "(server_url, context, model_name, world_size, kv_rank, vllm_block_size)",
                different=(
                    "`ipc://` alone, because any user of the machine can reach TCP; the link "
                    "has its own thread and sockets, so `context` is not used; waits "
                    "`timeout_s` for the agent; scheduler and workers find each other where "
                    "processes are arranged as in vLLM, and else by model name and world size, as "
                    "in the original, while all such workers have equal layouts: if engines of a "
                    "model differ, name each (`engine_id`, or `$LMCACHE_REDIS_ENGINE_ID`)"
                ),
            ),
            Name(
                "LMCacheMPSchedulerAdapter.maybe_submit_lookup_request",
                "(request_id, block_hashes=None, token_ids=None)",
                different=(
                    "ValueError and TypeError in place of assert; `cache_salt` for what token ids "
                    "do not say"
                ),
            ),
            Name(
                "LMCacheMPSchedulerAdapter.check_lookup_result",
                "(request_id)",
                different=(
                    "ValueError for a request without a lookup; 0 for a prompt shorter than a "
                    "chunk, where the original asserts; may wait; 0 if the agent is lost; within "
                    "2 s of its start, None until every worker has registered"
                ),
            ),
            Name(
                "LMCacheMPSchedulerAdapter.num_blocks_per_chunk",
                "()",
                different="chunks are rounded up to whole blocks, where the original refuses",
            ),
            Name("LMCacheMPSchedulerAdapter.cleanup_lookup_result", "(request_id)"),
            Name("LMCacheMPSchedulerAdapter.end_session", "(request_id)"),
            Name("LMCacheMPSchedulerAdapter.model_name"),
            Name("LMCacheMPSchedulerAdapter.world_size"),
            Name("LMCacheMPSchedulerAdapter.worker_id"),
            Name("LMCacheMPSchedulerAdapter.chunk_size"),
            Name("LMCacheMPSchedulerAdapter.blocks_in_chunk"),
            Name("LMCacheMPSchedulerAdapter.mq_client", left_out=_LINK),
            Name("LMCacheMPSchedulerAdapter.lookup_futures", left_out=_LINK),
            Name(
                "LMCacheMPSchedulerAdapter._create_key",
                "(token_ids, start=0, end=0, request_id=None)",
                left_out=_KEYS,
            ),
            Name(
                "LMCacheMPSchedulerAdapter._create_hash_key",
                "(chunk_hash, request_id=None)",
                left_out=_KEYS,
            ),
            Name(
                "LMCacheMPWorkerAdapter",
                "(server_url, context, model_name, world_size, kv_rank, vllm_block_size)",
                different="as the scheduler's; `kv_rank` is the rank in `world_size`",
            ),
            Name(
                "LMCacheMPWorkerAdapter.register_kv_caches",
                "(kv_caches)",
                different=(
                    "a bounded wait; DeviceError with the agent's reason if it refuses; what "
                    "the tensors leave open is given by name"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.submit_store_request",
                "(request_id, op, event)",
                different=(
                    "the event may be left out in CPU memory; `cache_salt` for what token ids "
                    "do not say"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.submit_retrieve_request",
                "(request_id, op, event)",
                different=(
                    "as for stores; blocks that were not loaded are reported one by one "
                    "(`get_block_ids_with_load_errors`), those of no whole chunk included"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.batched_submit_store_requests",
                "(request_ids, ops, event)",
                different=(
                    "one message, and an answer for each request, which is reported when its "
                    "own copy has ended; lists of unequal length raise and start nothing; empty "
                    "ones start nothing, where the original raises"
                ),
            ),
            Name(
                "LMCacheMPWorkerAdapter.batched_submit_retrieve_requests",
                "(request_ids, ops, event)",
                different="as for stores",
            ),
            Name(
                "LMCacheMPWorkerAdapter.get_finished",
                "(finished_req_ids_from_engine)",
                different="an id that consecutive calls repeat is reported once",
            ),
            Name("LMCacheMPWorkerAdapter.num_blocks_per_chunk", "()"),
            Name("LMCacheMPWorkerAdapter.model_name"),
            Name("LMCacheMPWorkerAdapter.world_size"),
            Name("LMCacheMPWorkerAdapter.worker_id"),
            Name("LMCacheMPWorkerAdapter.kv_caches"),
            Name("LMCacheMPWorkerAdapter.blocks_in_chunk"),
            Name("LMCacheMPWorkerAdapter.mq_client", left_out=_LINK),
            Name(
                "LMCacheMPWorkerAdapter.instance_id",
                left_out="the link names the process to the agent",
            ),
            Name("LMCacheMPWorkerAdapter.store_futures", left_out=_LINK),
            Name("LMCacheMPWorkerAdapter.retrieve_futures", left_out=_LINK),
            Name("LMCacheMPWorkerAdapter.finished_stores", left_out=_FINISHED),
            Name("LMCacheMPWorkerAdapter.previously_finished", left_out=_FINISHED),
            Name("LMCacheMPWorkerAdapter._update_and_get_finished_store", "()", left_out=_FINISHED),
            Name(
                "LMCacheMPWorkerAdapter._create_key",
                "(token_ids, start=0, end=0, request_id=None)",
                left_out=_KEYS,
            ),
            Name(
                "LMCacheMPWorkerAdapter._create_hash_key",
                "(chunk_hash, request_id=None)",
                left_out=_KEYS,
            ),
            Name(
                "LMCacheMPWorkerAdapter.shutdown",
                "()",
                different="returns whether no agent accesses the memory any more",
            ),
        ),
    ),
    Interface(
        "V1 protocol",
        "lmcache.v1.protocol",
        "lmcache_redis.compat.protocol",
        _LMCACHE,
        (
            Name("ClientCommand"),
            Name("ServerReturnCode"),
            Name(
                "RemoteMetadata",
                "(length, shapes, dtypes, fmt)",
                different=(
                    "an encoding of its own (docs/reference/value-format.md), with 64-bit sizes: "
                    "part of every value, not a second key; 0 to 8 groups; a `length` that shapes "
                    "and dtypes contradict is refused, unless `fmt` is BINARY or BINARY_BUFFER"
                ),
            ),
            Name("RemoteMetadata.serialize", "()"),
            Name("RemoteMetadata.serialize_into", "(buffer)", different="returns the length"),
            Name(
                "RemoteMetadata.deserialize",
                "(s)",
                different=(
                    "malformed bytes raise FormatError; what follows the metadata is not read, as "
                    "in the original"
                ),
            ),
            Name(
                "ClientMetaMessage",
                "(command, key, length, fmt, dtype, shape, location=None)",
                different="FormatError in place of assert; the key may be text too",
            ),
            Name("ClientMetaMessage.serialize", "()"),
            Name(
                "ClientMetaMessage.deserialize",
                "(s)",
                different="malformed bytes raise FormatError",
            ),
            Name("ClientMetaMessage.packlength", "()"),
            Name(
                "ServerMetaMessage",
                "(code, length, fmt, dtype, shape, location=None)",
                different="FormatError in place of assert",
            ),
            Name("ServerMetaMessage.serialize", "()"),
            Name(
                "ServerMetaMessage.deserialize",
                "(s)",
                different="malformed bytes raise FormatError",
            ),
            Name("ServerMetaMessage.packlength", "()"),
            Name(
                "init_remote_metadata_info",
                "(num_groups)",
                different=(
                    "0 to 8; only `get_remote_metadata_bytes` needs it, and metadata may have "
                    "another number of groups"
                ),
            ),
            Name(
                "get_remote_metadata_bytes",
                "()",
                different=(
                    "56 for one group and 96 for two, where the original has 28 and 48; of groups "
                    "of at most 4 dimensions; the encoding says its own number of groups"
                ),
            ),
            Name("DTYPE_TO_INT"),
            Name("INT_TO_DTYPE"),
            Name("LOCATION_TO_INT"),
            Name("INT_TO_LOCATION"),
            Name("MAX_KEY_LENGTH"),
            Name("MemoryFormat", different="also `PAGES`, for an engine's pages"),
            Name(
                "CacheEngineKey",
                "(model_name, world_size, worker_id, chunk_hash, dtype, request_configs={})",
                different="the fields of LMCache's earlier versions (`fmt` first) and of 0.5.6 "
                "(`dtype`, no `fmt`), in their order or by name; immutable; FormatError for a "
                "model name with @",
            ),
            Name("CacheEngineKey.to_string", "()"),
            Name("CacheEngineKey.from_string", "(s)", different="keeps leading zeros of a hash"),
            Name("CacheEngineKey.split_layers", "(num_layers)"),
            Name("CacheEngineKey.get_first_layer", "()"),
            Name("CacheEngineKey.with_new_worker_id", "(new_worker_id)"),
            Name(
                "LayerCacheEngineKey",
                "(model_name, world_size, worker_id, chunk_hash, dtype, request_configs={}, "
                "layer_id=0)",
                different="as above",
            ),
            Name("parse_cache_key", "(key_str)"),
        ),
    ),
    Interface(
        "Storage backends",
        "lmcache.storage_backend",
        "lmcache_redis.compat.storage_backend",
        "The originals are LMCache's first ones, from an undated copy of its documentation. Their "
        "modules `abstract_backend`, `hybrid_backend`, `local_backend` and `remote_backend` are "
        "one here.",
        (
            Name(
                "LMCBackendInterface",
                "(dst_device='cuda')",
                "a device that the machine lacks raises ConfigError at once, not in the first get; "
                "keys with tags are refused",
            ),
            Name(
                "LMCBackendInterface.batched_get",
                "(keys)",
                "an iterator in every backend, so that a chunk is used while others load",
            ),
            Name("LMCBackendInterface.batched_put", "(keys_and_chunks, blocking=True)"),
            Name(
                "LMCBackendInterface.close",
                "()",
                "may be called again; other calls raise RuntimeError then",
            ),
            Name("LMCBackendInterface.contains", "(key)"),
            Name("LMCBackendInterface.get", "(key)"),
            Name(
                "LMCBackendInterface.put",
                "(key, kv_chunk, blocking=True)",
                "a server or a disk that fails raises nothing, because a cache is no reason to "
                "fail; `batched_put` returns how many chunks were stored",
            ),
            Name(
                "LMCHybridBackend",
                "(config, metadata, mpool_metadata, dst_device='cuda')",
                "fetches no keys at the start, which would load the whole store; "
                "`pipelined_backend` changes nothing",
            ),
            Name("LMCHybridBackend.batched_get", "(keys)"),
            Name("LMCHybridBackend.close", "()"),
            Name("LMCHybridBackend.contains", "(key)"),
            Name("LMCHybridBackend.get", "(key)"),
            Name("LMCHybridBackend.put", "(key, value, blocking=True)"),
            Name(
                "LMCLocalBackend",
                "(config, metadata, dst_device='cuda')",
                "`local_device='cuda'` keeps chunks in host memory, because the GPU's belongs to "
                "the engine; a chunk keeps its dtype and shape",
            ),
            Name("LMCLocalBackend.close", "()"),
            Name("LMCLocalBackend.contains", "(key)"),
            Name("LMCLocalBackend.get", "(key)", "a tensor, as it was put"),
            Name("LMCLocalBackend.put", "(key, kv_chunk, blocking=True)", _TUPLES),
            Name("LMCLocalBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCLocalBackend.put_nonblocking", "(key, kv_chunk)"),
            Name("LMCLocalBackend.put_worker", "()", left_out=_THREADS),
            Name("LMCLocalBackend.remove", "(key)", "a missing key is no error: it may be evicted"),
            Name(
                "LMCLocalDiskBackend",
                "(config, metadata, dst_device='cuda')",
                "files with checksums, found again after a restart; a directory has one backend "
                "at a time, because two would break its limit",
            ),
            Name("LMCLocalDiskBackend.buffer_sweeper", "()", left_out=_THREADS),
            Name("LMCLocalDiskBackend.close", "()"),
            Name("LMCLocalDiskBackend.contains", "(key)"),
            Name("LMCLocalDiskBackend.get", "(key)", "a tensor, as it was put"),
            Name("LMCLocalDiskBackend.put", "(key, kv_chunk, blocking=True)", _TUPLES),
            Name("LMCLocalDiskBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCLocalDiskBackend.put_nonblocking", "(key, kv_chunk)"),
            Name("LMCLocalDiskBackend.put_worker", "()", left_out=_THREADS),
            Name("LMCLocalDiskBackend.remove", "(key)"),
            Name("LocalBackendEndSignal", "()", left_out=_THREADS),
            Name(
                "save_disk",
                "(path, kv_chunk)",
                left_out="an internal of its disk backend, whose files differ from those here; it "
                "is `safetensors.torch.save_file({'kv_chunk': kv_chunk.contiguous()}, path)`",
            ),
            Name(
                "LMCRemoteBackend",
                "(config, metadata, dst_device='cuda')",
                "`remote_url` names Redis or Valkey; `lm://` is refused, because there is a "
                "gateway here and no client; a `remote_serde` that compresses is refused",
            ),
            Name("LMCRemoteBackend.close", "()"),
            Name("LMCRemoteBackend.contains", "(key)"),
            Name("LMCRemoteBackend.get", "(key)"),
            Name("LMCRemoteBackend.list", "()", "foreign keys in Redis are left out"),
            Name("LMCRemoteBackend.put", "(key, kv_chunk, blocking=True)"),
            Name("LMCRemoteBackend.put_blocking", "(key, kv_chunk)"),
            Name("LMCRemoteBackend.put_worker", "()", left_out=_THREADS),
            Name(
                "LMCPipelinedRemoteBackend",
                "(config, metadata, dst_device='cuda')",
                "the same as `LMCRemoteBackend`: batched calls of every backend read and write "
                "ahead",
            ),
            Name("LMCPipelinedRemoteBackend.batched_get", "(keys)"),
            Name("LMCPipelinedRemoteBackend.close", "()"),
            Name("LMCPipelinedRemoteBackend.deserialize_worker", "()", left_out=_THREADS),
            Name("LMCPipelinedRemoteBackend.network_worker", "()", left_out=_THREADS),
            Name("RemoteBackendEndSignal", "()", left_out=_THREADS),
        ),
    ),
    Interface(
        "Settings of the storage backends",
        "lmcache.config",
        "lmcache_redis.compat.config",
        "The originals are those of the storage backends above.",
        (
            Name("LMCacheEngineConfig", different="as keywords, with LMCache's defaults"),
            Name("LMCacheEngineConfig.from_defaults", different="the same as the constructor"),
            Name("LMCacheEngineMetadata", different="the fields are plain data"),
            Name("LMCacheMemPoolMetadata", different="the fields are plain data"),
        ),
    ),
)
