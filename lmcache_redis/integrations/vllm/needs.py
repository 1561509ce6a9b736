# SPDX-License-Identifier: Apache-2.0
"""What lmcache_redis needs of vLLM's insides: all that no interface promises, in one place.

A row has the name, the first version that has it (``>=0.30``) or the first without it (``<0.31``)
where not all of 0.27.1 to 0.33 do, what it is for, and what happens without it. Code reaches these
things through the row alone: ``PAUSE_STATE.of(scheduler)``. `require` compares the table with
the vLLM of the process when a connector is made, tests/matrix/test_needs.py with every version.

What is elsewhere: the settings that an identity digests (`identity.pairs`, with a test of their
own), and vLLM's interfaces: the connector's, the tier's, configs and requests.

Where vLLM has an interface by now, it is used first: it hands over its manager of blocks and takes
failed loads by request from 0.30 on, and says that it sleeps from 0.33 on. None tells of pauses, of
new weights or of whose connector it makes: `making` sees the engine made.
"""

from __future__ import annotations

import logging

import vllm

from lmcache_redis.errors import Unsupported
from lmcache_redis.integrations.vllm.needed import OFF, Needed, VllmOwner

logger = logging.getLogger("vllm.lmcache_redis")

# The engine, its scheduler and its workers: methods that are wrapped, and what is read of them.

_core = VllmOwner("v1.engine.core:EngineCore")
COLLECTIVE_RPC = _core.need("collective_rpc", "wrapped: updates of weights go through it", OFF)
SET_WEIGHT_VERSION = _core.need(
    "set_weight_version", "wrapped: names the weights", "versions of weights are not shared"
)
ADD_LORA = _core.need(
    "add_lora", "wrapped: reads an adapter", "adapters are read anew with their next request"
)
CORE_SHUTDOWN = _core.need(
    "shutdown", "wrapped: ends its workers first", "the agent waits for a lease to end"
)
RESET_CACHES = _core.need(
    "_reset_caches", "wrapped: empties the caches for a pause", "a pause begins a new epoch"
)
MODEL_EXECUTOR = _core.need(
    "model_executor", "whose engine ends", "the agent waits for a lease to end", None
)
_executor = VllmOwner("v1.executor.abstract:Executor")
EXECUTOR_INIT = _executor.need("__init__", "wrapped: an engine is made", OFF)
EXECUTOR_CONFIG = _executor.need("vllm_config", "whose executor it is", OFF, None)
EXECUTOR_RPC = _executor.need("collective_rpc", "asks the workers of an engine", OFF)
SLEEP = _executor.need("sleep", "wrapped: level 2 throws the weights away", OFF)
WAKE_UP = _executor.need("wake_up", "wrapped: weights are back", "no earlier epoch comes back")
IS_SLEEPING = _executor.need("is_sleeping", "weights are not read then", default=False)
SLEEPING_TAGS = _executor.need(
    "sleeping_tags", "whether it is the weights that sleep", default=("weights",)
)
_worker = VllmOwner("v1.worker.worker_base:WorkerWrapperBase")
INIT_DEVICE = _worker.need("init_device", "wrapped: a worker will read a model", OFF)
WORKER = _worker.need("worker", "the worker", "requests with adapters are not cached", None)
WORKER_CONFIG = _worker.need("vllm_config", "whose worker it is", OFF, None)
_scheduler = VllmOwner("v1.core.sched.scheduler:Scheduler")
SCHEDULER_INIT = _scheduler.need("__init__", "wrapped: it makes the connector", OFF)
UPDATE_FROM_OUTPUT = _scheduler.need(
    "update_from_output", "wrapped: it takes the output of a step", OFF
)
SCHEDULER_CONFIG = _scheduler.need("vllm_config", "the engine's own config", OFF)
KV_CACHE_MANAGER = _scheduler.need(
    "kv_cache_manager", "blocks, if vLLM does not pass it", OFF, None
)
PAUSE_STATE = _scheduler.need("pause_state", "a pause says nothing to routers", default=0)
DEFERRED_FREES = _scheduler.need(
    "deferred_frees", "blocks that a reset waits for", "a reset may fail", ()
)

# Blocks. The interface hands their manager over: names that every version has are used as they are.

_manager = VllmOwner("v1.core.kv_cache_manager:KVCacheManager")
_pool = VllmOwner("v1.core.block_pool:BlockPool")
_block = VllmOwner("v1.core.kv_cache_utils:KVCacheBlock")
RESET_PREFIX_CACHE = _pool.need("reset_prefix_cache", "wrapped: every reset ends there", OFF)
GET_NEW_BLOCKS = _pool.need("get_new_blocks", "wrapped: every allocation ends there", OFF)
OF_BLOCKS = (
    _manager.need("block_pool", "the blocks", OFF),
    _manager.need("get_blocks", "the blocks of a request", OFF),
    _manager.need("free", "frees the blocks of a load that is given up", OFF),
    _pool.need("blocks", "blocks by their number", OFF),
    _pool.need("touch", "takes references to blocks", OFF),
    _pool.need("free_blocks", "gives references back", OFF),
    _pool.need("get_num_free_blocks", "whether there is room for a store", OFF),
    _pool.need("get_cached_block", "whose KV is in a block", OFF),
    _pool.need("hash_block_size", "the tokens of a block hash", OFF),
    _block.need("block_id", "blocks by their number", OFF),
    _block.need("ref_cnt", "whether a store alone holds a block", OFF),
    _block.need("is_null", "blocks that hold nothing", OFF),
)
_utils = VllmOwner("v1.core.kv_cache_utils")
HASH_SEED = _utils.need(
    "DEFAULT_NONE_HASH_SEED>=0.29", "block hashes equal everywhere", "PYTHONHASHSEED is required"
)
EVENT_KEYS = _utils.need("to_event_extra_keys>=0.31", "extra keys of events", default=list)
BLOCK_COPIES = VllmOwner("v1.core.sched.output:SchedulerOutput").need(
    "kv_cache_block_copies", "blocks that vLLM copies", "what was copied is not stored", None
)

# The connector's base class, and registries.

_base = VllmOwner("distributed.kv_transfer.kv_connector.v1.base")
TRANSFER_RESULTS = _base.need(
    "KVConnectorTransferResults>=0.30", "which loads failed", "models of several groups: off", None
)
_connector = VllmOwner("distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1")
UNREGISTER = _connector.need(
    "unregister_kv_caches>=0.33", "an engine will sleep", "with sleep mode on a GPU: off"
)
CONNECTOR_CONFIG = _connector.need("_vllm_config", "the connector's config", OFF)
CONNECTOR_KV_CACHE = _connector.need("_kv_cache_config", "groups of layers", OFF)
CONNECTOR_TRANSFER = _connector.need("_kv_transfer_config", "the connector's settings", OFF)
REGISTRY = VllmOwner("distributed.kv_transfer.kv_connector.factory:KVConnectorFactory").need(
    "_registry", "plugins are loaded more than once", OFF
)
TIER_REGISTRY = VllmOwner("v1.kv_offload.tiering.factory:SecondaryTierFactory").need(
    "_registry", "plugins are loaded more than once", "vLLM's tiers have no type redis"
)
LAYOUTS = VllmOwner("v1.kv_cache_layout").need(
    "KVCacheLayout>=0.29", "kv_cache_layout", "vLLM chooses the order in memory", None
)
HIT_SOURCE = VllmOwner("v1.metrics.cache_hit_source").need(
    "CacheHitSource>=0.32", "hits by tier in vLLM's metrics", "they are not told"
)
# Of base classes, for their subclasses: used as they are.
_tier_spec = VllmOwner("v1.kv_offload.tiering.spec:TieringOffloadingSpec")
OF_BASES = (
    _connector.need("_get_connector_metadata", "what a step carries", OFF),
    _tier_spec.need("_engine_id", "the region of an engine", "no tiers on a CPU"),
    _tier_spec.need("_worker", "copies blocks", "no tiers on a CPU"),
    _tier_spec.need("_validate_canonical_refs>=0.28", "canonical layouts", "no tiers on a CPU"),
)

# A worker's memory: parameters, adapters, layers.

_runner_of = VllmOwner("v1.worker.worker_base:WorkerBase")
MODEL_RUNNER = _runner_of.need("model_runner", "has the model", "resets count as new weights")
_runner = VllmOwner("v1.worker.gpu_model_runner:GPUModelRunner")
GET_MODEL = _runner.need("get_model", "the parameters", "resets count as new weights")
DRAFTER = _runner.need("drafter", "the draft model", default=None)
SPECULATOR = VllmOwner("v1.worker.gpu.model_runner:GPUModelRunner").need(
    "speculator", "the draft model", default=None
)
_offloader = VllmOwner("model_executor.offloader.prefetch:PrefetchOffloader")
DRAFTED_MODEL = VllmOwner("v1.spec_decode.draft_model:DraftModelProposer").need(
    "model", "the draft model", default=None
)
CPU_LINEAR = VllmOwner("model_executor.layers.utils:dispatch_cpu_unquantized_gemm").need(
    "cpu_linear", "packed weights", "no earlier epoch comes back", None
)
GET_OFFLOADER = VllmOwner("model_executor.offloader").need(
    "get_offloader", "weights in host memory", default=None
)
MODULE_OFFLOADERS = _offloader.need(
    "module_offloaders", "staged weights", "resets count as new weights"
)
PARAM_OFFLOADERS = VllmOwner("model_executor.offloader.prefetch:_ModuleOffloader").need(
    "_param_offloaders", "staged weights", "resets count as new weights"
)
_staged = VllmOwner("model_executor.offloader.prefetch:_BaseParamOffloader")
STAGED_PARAM = _staged.need("_param", "staged weights", "resets count as new weights")
STAGED_FROM = VllmOwner("model_executor.offloader.prefetch:_CpuParamOffloader").need(
    "_cpu_storage", "staged weights", "resets count as new weights"
)
PARTITIONS = VllmOwner("model_executor.parameter:SharedWeightParameter").need(
    "partitions", "parts of a weight", default=None
)
_lora = VllmOwner("v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin")
LORA_MANAGER = _lora.need("lora_manager", "adapters", "requests with adapters are not cached", None)
_adapters = VllmOwner("lora.worker_manager:WorkerLoRAManager")
LOAD_ADAPTER = _adapters.need(
    "_load_adapter", "wrapped: what is read", "requests with adapters are not cached"
)
LIST_ADAPTERS = _adapters.need(
    "list_adapters", "adapters in memory", "requests with adapters are not cached"
)
_lora_request = VllmOwner("lora.request:LoRARequest")
IS_3D = _lora_request.need("is_3d_lora_weight", "format of an adapter", default=False)
LOAD_INPLACE = _lora_request.need("load_inplace", "files are read at each step", default=False)
_layer = VllmOwner("model_executor.layers.attention.attention:Attention")
ATTN_BACKEND = VllmOwner("model_executor.layers.attention_layer_base:AttentionLayerBase").need(
    "get_attn_backend", "the name of a layer's backend", "it has no name"
)
LAYER_IMPL = _layer.need("impl", "the backend of a layer", default=None)
LAYER_CACHE = _layer.need("kv_cache", "what a backend writes to", default=None)
SHARED_LAYER = _layer.need(
    "kv_sharing_target_layer_name", "a layer that reads another's KV", default=None
)
KV_CACHE_DTYPE = _layer.need("kv_cache_dtype", "how KV is packed", default=None)
_scales = VllmOwner("model_executor.layers.attention.attention:set_default_quant_scales")
K_SCALE = _scales.need("_k_scale", "how K is scaled", default=None)
V_SCALE = _scales.need("_v_scale", "how V is scaled", default=None)
NUM_KV_HEADS = _layer.need("num_kv_heads", "the shape of K and V", default=None)
HEAD_SIZE = _layer.need("head_size", "the shape of K", default=None)
HEAD_SIZE_V = _layer.need("head_size_v", "the shape of V", default=None)
WINDOW = _layer.need("sliding_window", "what versions compute", default=None)
ATTN_TYPE = _layer.need("attn_type", "what versions compute", default=None)
HAS_SINK = _layer.need("has_sink", "what versions compute", default=False)
_impl = VllmOwner("v1.attention.backends.cpu_attn:CPUAttentionBackendImpl")
SCALE = _impl.need("scale", "what versions compute", default=None)
SOFT_CAP = _impl.need("logits_soft_cap", "what versions compute", default=None)
ALIBI = _impl.need("alibi_slopes", "what versions compute", default=None)
_rope = VllmOwner("model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase")
ROPE_TABLE = _rope.need("cos_sin_cache", "what versions compute", "versions do not share")
ROTARY_DIM = _rope.need("rotary_dim", "what versions compute", "versions do not share")
IS_NEOX = _rope.need("is_neox_style", "what versions compute", "versions do not share")
_mla = VllmOwner("model_executor.layers.attention.mla_attention:MLAAttention")
KV_LORA_RANK = _mla.need("kv_lora_rank", "the shape of a latent", default=None)
QK_ROPE_HEAD_DIM = _mla.need("qk_rope_head_dim", "the shape of its rotary part", default=None)
LAYER_SIZES = (NUM_KV_HEADS, HEAD_SIZE, HEAD_SIZE_V, KV_LORA_RANK, QK_ROPE_HEAD_DIM)
ISA = VllmOwner("v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder").need(
    "isa", "how a CPU packs KV", default=None
)
KV_UPDATE = _impl.need(
    "do_kv_cache_update", "writes known KV", "KV is identified by version and backend alone"
)

# Specs of KV caches.

_spec = VllmOwner("v1.kv_cache_interface:KVCacheSpec")
PREFIX_CACHEABLE = _spec.need(
    "prefix_cacheable>=0.29", "groups that are computed anew", default=True
)
MAX_TP_SHARDS = VllmOwner("v1.kv_cache_interface:AttentionSpec").need(
    "max_tp_shards>=0.31", "ranks with equal KV", default=None
)
SPEC_KV_HEADS = VllmOwner("v1.kv_cache_interface:AttentionSpec").need(
    "num_kv_heads", "ranks with equal KV", default=None
)
TP_REPLICATED = VllmOwner("v1.kv_cache_interface:MambaSpec").need(
    "tp_replicated>=0.29", "ranks with equal states", default=False
)
EXTRA_RETAINED = VllmOwner("v1.kv_cache_interface:SlidingWindowSpec").need(
    "extra_retained_tokens>=0.28", "how long a window's KV stays", default=0
)
INNER_SPECS = VllmOwner("v1.kv_cache_interface:UniformTypeKVCacheSpecs").need(
    "kv_cache_specs", "layers of one group that differ", default={}
)
_group = VllmOwner("v1.kv_cache_interface:KVCacheGroupSpec")
LAYER_NAMES = _group.need("layer_names", "layers of a group", default=())
HOST_RESIDENT = _group.need("host_resident>=0.30", "KV that cannot be loaded", default=False)
KV_TRANSFER = _group.need("enable_kv_transfer>=0.29", "KV that cannot be loaded", default=True)
_tensor = VllmOwner("v1.kv_cache_interface:KVCacheTensor")
BLOCK_STRIDE = _tensor.need("block_stride", "bytes between blocks", "those of the tensors")
TENSOR_LAYERS = _tensor.need("layers>=0.29", "bytes between blocks", "those of the tensors")

# Settings, where versions differ. Those that every version has are read as they are.

_config = VllmOwner("config.vllm:VllmConfig")
LORA_CONFIG = _config.need("lora_config", "--enable-lora", default=None)
DEVICE_CONFIG = _config.need("device_config", "the device", default=None)
SCHEDULER_SETTINGS = _config.need("scheduler_config", "chunked prefill", default=None)
AUX_OUTPUT_CONFIG = _config.need("aux_output_config>=0.31", "routed experts", default=None)
EC_TRANSFER_CONFIG = _config.need("ec_transfer_config", "who encodes images", default=None)
OBSERVABILITY_CONFIG = _config.need("observability_config", "spans", default=None)
KV_EVENTS_CONFIG = _config.need("kv_events_config", "KV events", default=None)
EC_ROLE = VllmOwner("config.ec_transfer:ECTransferConfig").need(
    "ec_role", "who encodes", default=None
)
OTLP_ENDPOINT = VllmOwner("config.observability:ObservabilityConfig").need(
    "otlp_traces_endpoint", "spans", default=None
)
DEVICE_TYPE = VllmOwner("config.device:DeviceConfig").need("device_type", "the device", default="")
CHUNKED_PREFILL = VllmOwner("config.scheduler:SchedulerConfig").need(
    "enable_chunked_prefill", "MLA on a CPU", default=True
)
_cache = VllmOwner("config.cache:CacheConfig")
CONFIG_HASH_BLOCK = _cache.need("hash_block_size>=0.32", "tokens of a block hash", default=None)
PREFIX_MATCH_UNIT = _cache.need("prefix_match_unit", "tokens of a block hash", default=None)
KV_SCALES = _cache.need("calculate_kv_scales<0.28", "scales of the first prompt", default=False)
_parallel = VllmOwner("config.parallel:ParallelConfig")
DCP_SIZE = _parallel.need("decode_context_parallel_size", "tokens over ranks", default=1)
PCP_SIZE = _parallel.need("prefill_context_parallel_size", "tokens over ranks", default=1)
WORLD_SIZE = _parallel.need("world_size", "external_launcher", default=1)
EXECUTOR_BACKEND = _parallel.need("distributed_executor_backend", "external_launcher", default=None)
NODES = _parallel.need("nnodes_within_dp", "a node without a scheduler", default=1)
DATA_PARALLEL_SIZE = _parallel.need("data_parallel_size", "dummy steps", default=1)
DATA_PARALLEL_INDEX = _parallel.need("data_parallel_index", "names of engines", default=None)
_model = VllmOwner("config.model:ModelConfig")
SLEEP_MODE = _model.need("enable_sleep_mode", "memory that is unmapped", default=False)
ENCODER_DECODER = _model.need("is_encoder_decoder", "no such models", default=False)
DIFFUSION = _model.need("is_diffusion", "no such models", default=False)
PREFIX_CACHING = _model.need("is_prefix_caching_supported", "models that vLLM caches", default=True)
USE_MLA = _model.need("use_mla", "MLA on a CPU", default=False)
MULTIMODAL = _model.need("multimodal_config", "names of media", default=None)
MODEL_WEIGHTS = _model.need("model_weights", "where the weights are", default="")
QUANTIZATION = _model.need("quantization", "rounding by GPU", default=None)
ROUTED_EXPERTS = _model.need(
    "enable_return_routed_experts<0.31", "prefixes without experts", default=False
)
AUX_EXPERTS = VllmOwner("config.aux_output:AuxOutputConfig").need(
    "enable_return_routed_experts>=0.31", "prefixes without experts", default=False
)
MM_HASHER = VllmOwner("config.multimodal:MultiModalConfig").need(
    "mm_hasher_algorithm", "names of media", default=None
)
LANGUAGE_ONLY = VllmOwner("config.multimodal:MultiModalConfig").need(
    "language_model_only", "whether there are media", default=False
)
MM_SCALES = VllmOwner("config.multimodal:MultiModalConfig").need(
    "mm_encoder_fp8_scale_path", "a file that changes KV", default=None
)
_draft = VllmOwner("config.speculative:SpeculativeConfig")
DRAFT_MODEL = _draft.need("draft_model_config", "weights of a draft", default=None)
DRAFT_LOAD = _draft.need("draft_load_config", "weights of a draft", default=None)
ROUTING_SIMULATION = VllmOwner("envs").need(
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "experts by chance", default=""
)
_request = VllmOwner("v1.request:Request")
TRACE_HEADERS = _request.need("trace_headers", "spans", default=None)
CACHE_SALT = _request.need("cache_salt", "whose request it is", default=None)
MM_FEATURES = _request.need("mm_features", "names of media", default=())
OF_REQUESTS = tuple(
    _request.need(name, "what to look up, load and store", OFF)
    for name in (
        "all_token_ids", "block_hashes", "is_finished", "kv_transfer_params", "lora_request",
        "num_computed_tokens", "num_prompt_tokens", "num_tokens", "skip_reading_prefix_cache",
    )
)  # fmt: skip

# Functions.

BGMV_EXPAND = VllmOwner("lora.ops.torch_ops").need(
    "bgmv_expand", "wrong adapters on a CPU", "prompts without an adapter are not cached there"
)
_ops = VllmOwner("_custom_ops")
PACKERS = (
    _ops.need("create_onednn_mm", "wrapped: packs weights", "no earlier epoch comes back"),
    _ops.need("create_onednn_scaled_mm", "wrapped: packs weights", "no earlier epoch comes back"),
)

ALL: list[Needed] = [each for each in globals().values() if isinstance(each, Needed)]
ALL += [*OF_BASES, *OF_BLOCKS, *OF_REQUESTS, *PACKERS]


_told: set[str] = set()


def missing(version: str = vllm.__version__, *, loads: bool = False) -> list[Needed]:
    """What this version should have, and the vLLM of this process lacks (`Needed.is_present`)."""
    return [e for e in ALL if e.is_expected(version) and not e.is_present(loads=loads)]


def require() -> None:
    """Says in a line of vLLM's log what is missing, and what follows: once a process.

    Raises Unsupported if no engine can be cached without it.
    """
    lacks = {f"{each} ({each.without})": each for each in missing()}
    if new := lacks.keys() - _told:
        _told.update(new)
        logger.warning("this vLLM (%s) lacks %s", vllm.__version__, "; ".join(sorted(new)))
    if names := [str(each) for each in lacks.values() if each.without == OFF]:
        raise Unsupported(f"this vLLM has no {' and no '.join(names)}")
