"""Settings whose values are in the identity, by pair, and those that are refused. Data alone.

A setting belongs here if it changes what is computed, or to how many bits, and also in doubt. Every
other one is in ``tests/matrix/left_out.py``: a setting of a supported vLLM without a verdict fails.

Settings are named by the class of vllm.config that has them. ``environment`` stands for the
variables of vllm.envs, ``os.environ`` for those that kernels read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Names of settings, separated by white space, by the class of vllm.config that has them.
Names = Mapping[str, str]


@dataclass(frozen=True)
class Pair:
    """A pair of the identity.

    content, reason: for docs/internals/identity.md. digested: settings whose values are the pair,
    or a part of it. computed: settings that are in it in another form (identity.py, weights.py), or
    that the layout shows.
    """

    content: str
    reason: str
    digested: Names = field(default_factory=dict)
    computed: Names = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """A setting with which nothing is cached, unless its value is ``unless``."""

    kind: str
    name: str
    unless: object
    reason: str


PAIRS: Mapping[str, Pair] = {
    "engine": Pair("the version of vLLM", "models, kernels and layouts change between versions"),
    "weights": Pair(
        "digest of the weight files, their index, quantization and processor configs, and the "
        "model's own code; for a model of the hub, of the files in its local cache, or the commit "
        "alone; with `--load-format dummy` the seed",
        "another fine-tune at the same path",
        computed={
            "ModelConfig": "model model_weights seed word_embeddings_untied_by_checkpoint",
            "LoadConfig": "download_dir",
            "environment": "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH",
        },
    ),
    "weights_id": Pair("the operator's name", "weights that cannot be read locally"),
    "load_format": Pair(
        "of the files",
        "a directory may hold weights in several formats",
        computed={"LoadConfig": "load_format"},
    ),
    "loader": Pair(
        "how files are chosen and read",
        "as above",
        digested={"LoadConfig": "model_loader_extra_config ignore_patterns"},
    ),
    "revision": Pair(
        "of the hub", "another state of the repository", computed={"ModelConfig": "revision"}
    ),
    "commit": Pair("of the hub", "a branch moves"),
    "model_config": Pair(
        "digest of the model's config after `--hf-overrides`, of its text part, and of settings "
        "that choose the code, quantize the weights, or make embeddings of images and video "
        "(`model_impl`, `quantization_config`, `mm_processor_kwargs`)",
        "rotary embedding, norms, scales, layers. vLLM hashes an image, not how it is processed. "
        "In the config vLLM also writes what a model chooses itself (Llama 4's temperature, by "
        "`--max-model-len`)",
        digested={
            "ModelConfig": """
                code_revision convert disable_sliding_window model_class_overrides model_impl
                override_attention_dtype quantization_config runner trust_remote_code
            """,
            "MultiModalConfig": """
                allow_missing_mm_embeddings language_model_only media_io_kwargs
                mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path
                mm_encoder_only mm_processor_kwargs video_pruning_method video_pruning_rate
            """,
        },
        computed={
            "ModelConfig": "hf_config hf_text_config hf_overrides hf_config_path config_format",
            "ModelArchitectureConfig": "*",
            "QuantizationConfigArgs": "*",
            "QuantSpec": "*",
            "VllmConfig": "quant_config",
        },
    ),
    "media": Pair(
        "how images and video are fetched and decoded",
        "as above: another choice of frames",
        digested={
            "environment": "VLLM_MEDIA_CONNECTOR VLLM_VIDEO_LOADER_BACKEND",
            "os.environ": "XHS_VIDEO_JPEG_QUALITY",
        },
    ),
    "context": Pair(
        "`long` or `short` for LongRoPE (Phi-3): whether `--max-model-len` exceeds the original "
        "length; the length itself for an unknown kind of rotary embedding; else empty",
        "vLLM chooses the rotary factors by it. Other models share across lengths",
        computed={"ModelConfig": "max_model_len", "environment": "VLLM_ALLOW_LONG_MAX_MODEL_LEN"},
    ),
    "model_dtype": Pair(
        "of weights and activations",
        "fewer bits, not only another order of summation",
        computed={"ModelConfig": "dtype"},
    ),
    "quantization": Pair("of weights", "as above", computed={"ModelConfig": "quantization"}),
    "kv_cache_dtype": Pair("of K and V", "as above", computed={"CacheConfig": "cache_dtype"}),
    "kv_cache": Pair(
        "layers excluded from a quantized cache, windows, the form of states "
        "(`kv_cache_dtype_skip_layers`, `sliding_window`, `mamba_ssm_cache_dtype`)",
        "what a layer keeps, and in how many bits",
        digested={
            "CacheConfig": """
                kv_cache_dtype_skip_layers kv_sharing_fast_prefill mamba_cache_dtype
                mamba_ssm_cache_dtype replayssm_buffer_len sliding_window swa_bounded_replay
                use_kda_recoverssm use_replayssm
            """,
            "MambaConfig": "enable_stochastic_rounding stochastic_rounding_philox_rounds",
            "environment": "VLLM_MLA_DISABLE",
        },
    ),
    "kv_packing": Pair(
        "digest of the bytes that the layers' own backend writes for known K and V", "see below"
    ),
    "kv_scales": Pair(
        "`_k_scale` and `_v_scale` of every layer",
        "a quantized cache has no meaning without them",
        computed={"environment": "Q_SCALE_CONSTANT K_SCALE_CONSTANT V_SCALE_CONSTANT"},
    ),
    "byte_order": Pair(
        "the order that vLLM was told to use inside a block",
        "as for `kv_packing`, also for states",
        digested={
            "CacheConfig": "kv_cache_layout",
            "KVTransferConfig": "enable_permute_local_kv",
            "environment": """
                VLLM_KV_CACHE_LAYOUT VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT
            """,
        },
    ),
    "attention_backend": Pair(
        "names of the backends in use",
        "the order of bytes in a block",
        computed={"AttentionConfig": "backend backend_per_kind"},
    ),
    "attention": Pair(
        "quantized queries, and how a sparse model chooses tokens "
        "(`use_prefill_query_quantization`, `indexer_kv_dtype`)",
        "fewer bits, or other tokens",
        digested={
            "AttentionConfig": """
                disable_flashinfer_q_quantization indexer_kv_dtype indexer_sparse_logits
                minimax_m3_indexer_cp minimax_m3_msa_decode_backend sparse_mla_force_mqa
                trtllm_ragged_backend use_fp4_indexer_cache use_non_causal
                use_prefill_query_quantization use_trtllm_attention
            """,
            "KernelConfig": "sparse_indexer_topk_backend",
        },
    ),
    "kernels": Pair(
        "kernels for experts and linear layers that an operator has chosen (`moe_backend`, "
        "`linear_backend`, `VLLM_USE_DEEP_GEMM_E8M0`)",
        "for one checkpoint they compute with other bits: `emulation` quantizes activations, "
        "`marlin` only weights. What vLLM chooses for a GPU by itself is left out, see below",
        digested={
            "KernelConfig": """
                enable_bf16x3_router_gemm linear_backend linear_backend_per_quant moe_backend
                monokernel
            """,
            "ParallelConfig": "all2all_backend",
            "environment": """
                VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_SGL_KERNEL VLLM_DISABLED_KERNELS
                VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_USE_DEEP_GEMM VLLM_ROCM_FP8_MFMA_PAGE_ATTN
                VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
                VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_MOE VLLM_TEST_FORCE_FP8_MARLIN
                VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_FLASHINFER_MOE_INT4
                VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC
            """,
        },
    ),
    "environment": Pair(
        "variables that reduce precision (`VLLM_MARLIN_INPUT_DTYPE`, `VLLM_CPU_INT4_W4A8`, "
        "`VLLM_FLOAT32_MATMUL_PRECISION`)",
        "fewer bits, not only another order of summation",
        digested={
            "environment": """
                AITER_SITUV2_A8W4 VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_BATCH_INVARIANT
                VLLM_CPU_INT4_W4A8 VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION
                VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE
                VLLM_FLOAT32_MATMUL_PRECISION VLLM_HUMMING_INPUT_QUANT_CONFIG
                VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_MARLIN_INPUT_DTYPE
                VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD
                VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
                VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
                VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION
                VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_USE_AITER_FP4BMM
                VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4
                VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4
                VLLM_XPU_INC_WNA16_BACKEND
            """,
            "os.environ": "FLA_TRIL_PRECISION FLA_USE_FAST_OPS MINIMAX_KVFP4_FP8_PAIR_DEQUANT",
        },
    ),
    "lora": Pair(
        "how an adapter is read, and to which modules it applies",
        "the adapter itself is in the chunk's name, see below",
        digested={
            "LoRAConfig": """
                enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
                lora_dtype target_modules
            """,
        },
    ),
    "draft": Pair(
        "weights and config of the draft model (EAGLE, MTP, a draft model), and how it runs "
        "(`parallel_drafting`, `moe_backend`)",
        "its layers share the blocks. The draft KV of a chunk's last token may depend on the token "
        "after it, which the hash does not cover: drafts may be worse there, and the target model "
        "verifies them",
        digested={
            "SpeculativeConfig": """
                attention_backend disable_lookahead_block_hashes draft_tensor_parallel_size
                index_share_for_mtp_iteration kv_cache_dtype moe_backend parallel_drafting
                use_heterogeneous_vocab
            """,
            "environment": "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
        },
        computed={
            "SpeculativeConfig": """
                code_revision draft_load_config draft_model_config method model quantization
                revision target_model_config
            """,
        },
    ),
    "code": Pair(
        "classes, passes and plugins of others",
        "they may compute anything",
        digested={
            "ParallelConfig": "worker_cls worker_extension_cls sd_worker_cls",
            "CompilationConfig": "inductor_passes",
            "environment": "VLLM_PLUGINS",
        },
    ),
    "platform_config": Pair(
        "",
        "platforms outside vLLM read their settings from it",
        digested={"VllmConfig": "additional_config"},
    ),
    "block_hash": Pair(
        "the hash algorithm",
        "what a hash covers",
        computed={"CacheConfig": "prefix_caching_hash_algo"},
    ),
    "tensor_parallel": Pair(
        "the split",
        "heads of this worker",
        computed={
            "ParallelConfig": "tensor_parallel_size rank world_size",
            "SpeculativeConfig": "target_parallel_config draft_parallel_config",
        },
    ),
    "pipeline_parallel": Pair(
        "the split",
        "layers of this worker",
        computed={"ParallelConfig": "pipeline_parallel_size"},
    ),
    "layer_split": Pair(
        "which layers are in which stage",
        "as above",
        digested={"environment": "VLLM_PP_LAYER_PARTITION"},
    ),
    "rank": Pair(
        "the worker's; where several ranks hold the same bytes (MLA, fewer KV heads than ranks), "
        "`shard I of N`, equal for them",
        "its part of the split",
    ),
}

REFUSED = (
    Refused(
        "environment",
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
        "",
        "experts are chosen by a simulation, and the KV is not the model's",
    ),
)
