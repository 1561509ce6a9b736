# SPDX-License-Identifier: Apache-2.0
"""Verdicts on settings whose own values are in no pair. Data alone, which no engine reads.

A setting belongs in ``LEFT_OUT`` if it decides when, where or with which kernel of equal precision
something is computed: replicas that differ in it share. ``*`` ends a family of names whose purpose
is clear, and alone it stands for every field of a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_redis.integrations.vllm.identity.pairs import Names


@dataclass(frozen=True)
class LeftOut:
    """what: a common name of the settings, with some of them."""

    what: str
    reason: str
    names: Names


LEFT_OUT = (
    LeftOut(
        "context parallelism, diffusion, encoder instances, devices (`dcp_*`, `device_config`)",
        "values that would matter are refused, see below",
        {
            "VllmConfig": "diffusion_config device_config",
            "DiffusionConfig": "*",
            "DeviceConfig": "*",
            "ECTransferConfig": "*",
            "CacheConfig": "calculate_kv_scales prefix_match_unit hash_block_size",
            "ModelConfig": "enable_return_routed_experts",
            "AuxOutputConfig": "*",
            "ParallelConfig": """
                _allow_auto_resolve_cp_interleave_size cp_* dcp_* decode_context_parallel_size
                prefill_context_parallel_size
            """,
            "environment": """
                VLLM_DCP_Q_REPLICATE VLLM_MOE_ROUTING_SIMULATION_STRATEGY
                VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_USE_DIRECT_DCP_*
            """,
        },
    ),
    LeftOut(
        "configurations inside others (`cache_config`)",
        "their own settings have verdicts",
        {
            "VllmConfig": """
                attention_config aux_output_config cache_config compilation_config ec_manager_config
                ec_transfer_config engram_config kernel_config kv_events_config kv_transfer_config
                load_config logging_config lora_config mamba_config model_config
                observability_config offload_config parallel_config profiler_config reasoning_config
                scheduler_config speculative_config structured_outputs_config watchdog_config
                watermark_config
            """,
            "ModelConfig": "multimodal_config pooler_config is_submodel_config",
            "AttentionConfig": "hisparse_config",
            "KernelConfig": "ir_op_priority",
            "ParallelConfig": "eplb_config fault_tolerance_config",
            "CompilationConfig": "pass_config dynamic_shapes_config",
            "OffloadConfig": "uva prefetch",
            "SpeechToTextParams": "*",
        },
    ),
    LeftOut(
        "scheduling (`max_num_seqs`, `async_scheduling`, `scheduler_cls`)",
        "it decides in which step a token is computed: the order of summation, which also differs "
        "between two runs of one engine",
        {
            "SchedulerConfig": """
                async_scheduling disable_chunked_mm_input disable_hybrid_kv_cache_manager
                enable_chunked_prefill encoder_cache_size is_multimodal_model
                long_prefill_token_threshold* max_num_* policy prefill_schedule_interval runner_type
                scheduler_cls scheduler_reserve_full_isl stream_interval watermark
            """,
            "ParallelConfig": """
                dbo_decode_token_threshold dbo_prefill_token_threshold dp_sync_interval
                enable_batch_sharded_sampling enable_dbo ubatch_size
            """,
            "EncoderCacheManagerConfig": "*",
            "VllmConfig": "performance_mode",
            "environment": """
                VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_DBO_COMM_SMS
                VLLM_MOE_SKIP_PADDING VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_USE_V2_MODEL_RUNNER
                VLLM_XPU_PP_MICROBATCH
            """,
        },
    ),
    LeftOut(
        "compilation and CUDA graphs (`enforce_eager`, `optimization_level`)",
        "the same computation, fused and ordered otherwise: the last bits",
        {
            "CompilationConfig": """
                backend cache_dir compilation_time compile_cache_save_format compile_mm_encoder
                compile_ranges_endpoints compile_sizes cudagraph_* custom_ops debug_dump_path
                decoder_replay_* disabled_custom_ops enabled_custom_ops encoder_compilation_time
                encoder_cudagraph_* fast_moe_cold_start inductor_compile_config ir_enable_torch_wrap
                local_cache_dir max_cudagraph_capture_size mode splitting_ops static_all_moe_layers
                static_forward_context traced_files use_inductor_graph_partition
            """,
            "PassConfig": """
                eliminate_noops enable_qk_norm_rope_fusion enable_sp fi_allreduce_fusion_max_size_mb
                fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms
                fuse_mla_dual_rms_norm fuse_norm_quant fuse_qk_norm_rope_kvcache fuse_rope_kvcache
                fuse_rope_kvcache_cat_mla rope_kvcache_fusion_max_token_num sp_min_token_num
            """,
            "DynamicShapesConfig": "*",
            "Range": "*",
            "VllmConfig": "optimization_level",
            "ModelConfig": "enforce_eager",
            "SpeculativeConfig": "enforce_eager",
            "environment": """
                VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_CUDAGRAPH_GC
                VLLM_ENABLE_INDUCTOR_* VLLM_ENABLE_PREGRAD_PASSES VLLM_FORCE_AOT_LOAD
                VLLM_PATTERN_MATCH_DEBUG VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH
                VLLM_USE_BYTECODE_HOOK VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT
                VLLM_USE_STANDALONE_COMPILE VLLM_XLA_* VLLM_XPU_ENABLE_XPU_GRAPH
            """,
        },
    ),
    LeftOut(
        "kernels of equal precision (`flash_attn_version`, `VLLM_USE_TRITON_AWQ`)",
        "they change the order of summation: the last bits",
        {
            "AttentionConfig": """
                flash_attn_max_num_splits_for_cuda_graph flash_attn_version flex_attn_*
                indexer_tp_shard_min_rows mla_prefill_backend sparse_mla_prefill_workspace_factor
                tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
                use_prefill_decode_attention
            """,
            "KernelConfig": """
                enable_cutedsl_warmup enable_flashinfer_autotune enable_jit_warmup
                enable_rocm_segmented_attn_autotune
            """,
            "IrOpPriorityConfig": "*",
            "MambaConfig": "backend ssu_algorithm",
            "ModelConfig": "disable_cascade_attn",
            "MultiModalConfig": "mm_encoder_attn_backend mm_encoder_tp_mode",
            "LoRAConfig": "fully_sharded_loras specialize_active_lora",
            "environment": """
                VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_CPU_ATTN_SPLIT_KV
                VLLM_DEEP_GEMM_WARMUP VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
                VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE
                VLLM_ENABLE_HPC_OPS VLLM_FLASHINFER_AUTOTUNE_* VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE
                VLLM_GDN_DECODE_KERNEL VLLM_HAS_FLASHINFER_CUBIN VLLM_HUMMING_MOE_GEMM_TYPE
                VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL
                VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
                VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS
                VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
                VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING
                VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_LINEAR_HIPBMM
                VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_RMSNORM
                VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
                VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
                VLLM_ROCM_USE_SKINNY_GEMM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD
                VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_STEP5_SHARD_SP_SHARED_EXPERT
                VLLM_TRITON_ATTN_USE_TD VLLM_TRITON_FORCE_FIRST_CONFIG
                VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_TRITON_USE_TD VLLM_TUNED_CONFIG_FOLDER
                VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_OINK_OPS VLLM_USE_TRITON_AWQ
                VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_ZENTORCH_WEIGHT_PREPACK
            """,
        },
    ),
    LeftOut(
        "parallelism and communication (`enable_expert_parallel`, `VLLM_NCCL_*`)",
        "which process computes what, and how it is sent; all-reduce algorithms change the order "
        "of summation",
        {
            "ParallelConfig": """
                _api_process_* assigned_physical_gpu_ids _coord_store_port
                cpu_distributed_timeout_seconds data_parallel_* _data_parallel_master_port_list
                disable_custom_all_reduce disable_nccl_for_dp_synchronization
                distributed_executor_backend distributed_timeout_seconds elastic_ep_max_dp_size
                enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
                enable_fault_tolerance enable_hc_sp enable_shm_tensor_arena
                expert_placement_strategy is_moe_model master_addr master_port
                max_parallel_loading_workers nnodes node_rank numa_* placement_group ray_*
            """,
            "EPLBConfig": "*",
            "FaultToleranceConfig": "*",
            "MultiModalConfig": "mm_tensor_ipc",
            "VllmConfig": "instance_id shutdown_timeout",
            "environment": """
                CUDA_VISIBLE_DEVICES LOCAL_RANK VLLM_*_TIMEOUT_SECONDS
                VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLREDUCE_USE_* VLLM_CPU_NUM_OF_RESERVED_CPU
                VLLM_CPU_OMP_THREADS_BIND VLLM_DEEPEP_BUFFER_SIZE_MB
                VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL
                VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLE_PYNCCL
                VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_* VLLM_ELASTIC_EP_* VLLM_ENABLE_GEMM_RS
                VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ENGINE_*_TIMEOUT_S
                VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_GPU_NIC_PCIE_MAPPING VLLM_HOST_IP
                VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_LOOPBACK_IP
                VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NCCL_*
                VLLM_NIC_SELECTION_VARS VLLM_NIXL_EP_MAX_NUM_RANKS VLLM_PORT VLLM_RAY_*
                VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_REPLICATE_EMBED
                VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_RPC_BASE_PATH
                VLLM_SKIP_P2P_CHECK VLLM_TPU_USING_PATHWAYS VLLM_USE_NCCL_SYMM_MEM VLLM_USE_RAY_*
                VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD
            """,
        },
    ),
    LeftOut(
        "memory and offloading (`gpu_memory_utilization`, `offload_backend`)",
        "where KV, states and weights are, and how many fit; the size of a block and of its pages "
        "is in the layout",
        {
            "CacheConfig": """
                block_size _block_size_resolved cache_hit_alignment_tokens
                effective_attention_block_size gpu_memory_utilization is_attention_free
                kv_cache_max_concurrency kv_cache_memory_bytes kv_cache_size_tokens kv_offloading_*
                mamba_block_size mamba_page_size_padded num_cpu_blocks num_gpu_blocks
                num_gpu_blocks_override simple_cpu_offload_* skip_page_size_padded
                user_specified_block_size user_specified_mamba_block_size
            """,
            "ModelConfig": """
                enable_cumem_allocator enable_nccl_comm_suspend enable_sleep_mode sleep_*
            """,
            "MultiModalConfig": """
                mm_ipc_gpu_memory_gb mm_processor_cache_* mm_shm_cache_max_object_size_mb
                skip_mm_profiling
            """,
            "LoadConfig": "device pt_load_map_location safetensors_* use_tqdm_on_load",
            "OffloadConfig": "offload_backend",
            "UVAOffloadConfig": "*",
            "PrefetchOffloadConfig": "*",
            "EngramConfig": "*",
            "HiSparseConfig": "*",
            "environment": """
                VLLM_CPU_KVCACHE_SPACE VLLM_ENABLE_STARTUP_PLAN VLLM_FASTSAFETENSORS_QUEUE_SIZE
                VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
                VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PLE_CPU_OFFLOAD
                VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_WEIGHT_OFFLOADING_*
                VLLM_WSL2_ENABLE_PIN_MEMORY
            """,
        },
    ),
    LeftOut(
        "prefix caching, other connectors (`enable_prefix_caching`, `kv_role`)",
        "which blocks are kept, and who else has them",
        {
            "CacheConfig": """
                enable_mamba_fine_grained_prefix_cache enable_mamba_shared_prefix_checkpoint
                enable_prefix_caching mamba_cache_mode prefix_cache_retention_interval
            """,
            "SpeculativeConfig": "disable_eagle_block_drop",
            "KVTransferConfig": """
                engine_id kv_buffer_* kv_connector kv_connector_extra_config
                kv_connector_module_path kv_ip kv_load_failure_policy kv_parallel_size kv_port
                kv_rank kv_role
            """,
            "KVEventsConfig": "*",
            "environment": """
                MOONCAKE_* VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_EC_SIDE_CHANNEL_*
                VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_MOONCAKE_* VLLM_NIXL_SIDE_CHANNEL_*
                VLLM_P2P_* VLLM_PREFIX_CACHE_RETENTION_INTERVAL
            """,
        },
    ),
    LeftOut(
        "new weights in a running engine (`weight_transfer_config`)",
        "they begin an epoch",
        {
            "VllmConfig": "weight_transfer_config",
            "WeightTransferConfig": "*",
            "environment": "VLLM_SERVER_DEV_MODE",
        },
    ),
    LeftOut(
        "limits for adapters (`max_loras`, `max_lora_rank`)",
        "the adapter of a request is in the chunk's name",
        {
            "LoRAConfig": """
                default_mm_loras max_cpu_loras max_lora_cls_labels max_lora_rank max_loras
            """,
            "environment": "VLLM_LORA_RESOLVER_* VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        },
    ),
    LeftOut(
        "prompts, and what may be asked (`tokenizer`, `VLLM_HTTP_*`)",
        "block hashes cover token ids, images (by their hash) and embeddings",
        {
            "ModelConfig": """
                allow_deprecated_quantization allowed_local_media_path allowed_media_domains
                enable_prompt_embeds hf_token io_processor_plugin renderer_num_workers
                served_model_name skip_tokenizer_init tokenizer tokenizer_mode tokenizer_revision
            """,
            "MultiModalConfig": """
                enable_mm_embeds interleave_mm_strings limit_per_prompt mm_encoder_fp8_scale_save_*
                mm_hasher_algorithm
            """,
            **dict.fromkeys(
                (
                    "AudioDummyOptions",
                    "BaseDummyOptions",
                    "ImageDummyOptions",
                    "VideoDummyOptions",
                    "SpeechToTextConfig",
                ),
                "*",
            ),
            "environment": """
                VLLM_*_FETCH_TIMEOUT VLLM_API_KEY VLLM_CHAT_TEMPLATE_* VLLM_ENABLE_COHERE_API
                VLLM_ENABLE_RESPONSES_API_STORE VLLM_GPT_OSS_* VLLM_HTTP_*
                VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_MAX_AUDIO_* VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
                VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS
                VLLM_MAX_MEDIA_* VLLM_MAX_N_SEQUENCES VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_STOP_STRINGS
                VLLM_MEDIA_CACHE* VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT
                VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MM_HASHER_ALGORITHM VLLM_RUST_FRONTEND_PATH
                VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE
                VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT
                VLLM_USE_FASTOKENS VLLM_USE_RUST_*
            """,
        },
    ),
    LeftOut(
        "sampling, drafts, answers (`generation_config`, `num_speculative_tokens*`)",
        "they choose tokens. A token's KV does not depend on how it was chosen: drafts without "
        "layers in the cache (ngram, suffix, Medusa) change nothing",
        {
            "ModelConfig": """
                enable_trace_replay generation_config logits_processors logprobs_mode max_logprobs
                override_generation_config return_sampling_mask spec_target_max_model_len
                use_fp64_gumbel
            """,
            "PoolerConfig": "*",
            "SpeculativeConfig": """
                disable_padded_drafter_batch draft_lm_head_quantization draft_sample_method
                dspark_draft_topk enable_adaptive_verification fly_* max_model_len
                num_speculative_tokens* prompt_lookup_* rejection_sample_method suffix_decoding_*
                synthetic_acceptance_* tensor_parallel_size use_local_argmax_reduction xpress_topc
            """,
            "StructuredOutputsConfig": "*",
            "ReasoningConfig": "*",
            "WatermarkConfig": "*",
            "environment": """
                VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
                VLLM_COMPUTE_NANS_IN_LOGITS VLLM_ENFORCE_STRICT_TOOL_CALLING
                VLLM_RAISE_ON_LOGIT_NANS VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
                VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_XPU_USE_SAMPLER_KERNEL
            """,
        },
    ),
    LeftOut(
        "logs, metrics and profiles (`VLLM_LOG*`)",
        "they observe",
        {
            **dict.fromkeys(
                ("ObservabilityConfig", "ProfilerConfig", "LoggingConfig", "WatchdogConfig"), "*"
            ),
            "environment": """
                FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CPU_CI_ENV
                VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_* VLLM_DISABLE_LOG_LOGO
                VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_LOG* VLLM_NO_USAGE_STATS
                VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PROCESS_NAME_PREFIX VLLM_REQUEST_BODY_LOG_LEVEL
                VLLM_TEST_FORCE_LOAD_FORMAT VLLM_TRACE_FUNCTION VLLM_USAGE_*
            """,
        },
    ),
    LeftOut(
        "installation (`VLLM_TARGET_DEVICE`, `CUDA_HOME`)",
        "how vLLM was built, and where its files are",
        {
            "environment": """
                CMAKE_BUILD_TYPE CUDA_HOME LD_LIBRARY_PATH MAX_JOBS NVCC_THREADS S3_* VERBOSE
                VLLM_ASSETS_CACHE* VLLM_BUILD_* VLLM_CACHE_ROOT VLLM_CONFIG_ROOT
                VLLM_CUDA_COMPATIBILITY_PATH VLLM_CUDART_SO_PATH VLLM_DOCKER_BUILD_CONTEXT
                VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_IMAGE_TAG VLLM_MAIN_CUDA_VERSION
                VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TARGET_DEVICE
                VLLM_USE_PRECOMPILED*
            """,
        },
    ),
)

# Settings that are in a pair in another form (engine_identity.py, weights.py), or that the layout
# shows, by pair.
COMPUTED: Mapping[str, Names] = {
    "weights": {
        "ModelConfig": "model model_weights seed word_embeddings_untied_by_checkpoint",
        "LoadConfig": "download_dir",
        "environment": "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH",
    },
    "plugins": {"environment": "VLLM_PLUGINS"},
    "load_format": {"LoadConfig": "load_format"},
    "revision": {"ModelConfig": "revision"},
    "model_config": {
        "ModelConfig": "hf_config hf_text_config hf_overrides hf_config_path config_format",
        "ModelArchitectureConfig": "*",
        "QuantizationConfigArgs": "*",
        "QuantSpec": "*",
        "VllmConfig": "quant_config",
    },
    "context": {
        "ModelConfig": "max_model_len",
        "environment": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    },
    "model_dtype": {"ModelConfig": "dtype"},
    "quantization": {"ModelConfig": "quantization"},
    "kv_cache_dtype": {"CacheConfig": "cache_dtype"},
    "kv_scales": {"environment": "Q_SCALE_CONSTANT K_SCALE_CONSTANT V_SCALE_CONSTANT"},
    "attention_backend": {"AttentionConfig": "backend backend_per_kind"},
    "draft": {
        "SpeculativeConfig": """
            code_revision draft_load_config draft_model_config method model quantization revision
            target_model_config
        """
    },
    "block_hash": {"CacheConfig": "prefix_caching_hash_algo"},
    "tensor_parallel": {
        "ParallelConfig": "tensor_parallel_size rank world_size",
        "SpeculativeConfig": "target_parallel_config draft_parallel_config",
    },
    "pipeline_parallel": {"ParallelConfig": "pipeline_parallel_size"},
}
