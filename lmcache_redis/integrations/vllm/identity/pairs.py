# SPDX-License-Identifier: Apache-2.0
"""Settings whose values are in the identity, by pair. Data alone.

A setting belongs here if it changes what is computed, or to how many bits, and also in doubt. Every
other one is in ``tests/matrix/left_out.py``: a test fails for a setting without a verdict.

Settings are named by the class of vllm.config that has them. ``environment`` stands for the
variables of vllm.envs, ``os.environ`` (here os_environ) for those that kernels read without it.
"""

from __future__ import annotations

from collections.abc import Mapping

# Names of settings, separated by white space, by the class of vllm.config that has them.
Names = Mapping[str, str]


class Pair:
    """What a pair is, for people, and the settings whose values are the pair or a part of it."""

    def __init__(self, content: str, **digested: str) -> None:
        self.content = content
        self.digested: Names = {kind.replace("_", "."): each for kind, each in digested.items()}


PAIRS: Mapping[str, Pair] = {
    "engine": Pair("the version of vLLM; with `share_across_versions` `any`, unless it stays"),
    "transformers": Pair(
        "its version, or `any`: it prepares images, and has the code of some models"
    ),
    "computation": Pair(
        "in the place of versions: digest of the classes and numbers of the model's modules, of "
        "its own code and of its rotary embeddings"
    ),
    "plugins": Pair("of vLLM that are installed and allowed, with the versions of their packages"),
    "weights": Pair(
        "digest of the weight files, their index, quantization and processor configs, and the "
        "model's own code; for a model of the hub, of the files in its local cache, or the commit "
        "alone; with `--load-format dummy` the seed"
    ),
    "weights_id": Pair("the operator's name"),
    "load_format": Pair("of the files"),
    "loader": Pair(
        "how files are chosen and read", LoadConfig="model_loader_extra_config ignore_patterns"
    ),
    "revision": Pair("of the hub"),
    "commit": Pair("of the hub"),
    "model_config": Pair(
        "digest of the model's config after `--hf-overrides`, of its text part, and of settings "
        "that choose the code, quantize the weights, or make embeddings of images and video "
        "(`model_impl`, `quantization_config`, `mm_processor_kwargs`)",
        ModelConfig="""
            code_revision convert disable_sliding_window model_class_overrides model_impl
            override_attention_dtype quantization_config runner trust_remote_code
        """,
        MultiModalConfig="""
            allow_missing_mm_embeddings language_model_only media_io_kwargs
            mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_only mm_processor_kwargs video_pruning_method video_pruning_rate
        """,
    ),
    "media": Pair(
        "how images and video are fetched and decoded",
        environment="VLLM_MEDIA_CONNECTOR VLLM_VIDEO_LOADER_BACKEND",
        os_environ="XHS_VIDEO_JPEG_QUALITY",
    ),
    "context": Pair("`--max-model-len` where K depends on it (LongRoPE of Phi-3); else empty"),
    "model_dtype": Pair("of weights and activations"),
    "quantization": Pair("of weights"),
    "kv_cache_dtype": Pair("of K and V"),
    "kv_cache": Pair(
        "layers excluded from a quantized cache, windows, the form of states "
        "(`kv_cache_dtype_skip_layers`, `sliding_window`, `mamba_ssm_cache_dtype`)",
        CacheConfig="""
            kv_cache_dtype_skip_layers kv_sharing_fast_prefill mamba_cache_dtype
            mamba_ssm_cache_dtype replayssm_buffer_len sliding_window swa_bounded_replay
            use_kda_recoverssm use_replayssm
        """,
        MambaConfig="enable_stochastic_rounding stochastic_rounding_philox_rounds",
        environment="VLLM_MLA_DISABLE",
    ),
    "kv_packing": Pair("digest of the bytes that the layers' own backend writes for known K and V"),
    "kv_scales": Pair("`_k_scale` and `_v_scale` of every layer"),
    "byte_order": Pair(
        "the order that vLLM was told to use inside a block",
        CacheConfig="kv_cache_layout",
        KVTransferConfig="enable_permute_local_kv",
        environment="""
            VLLM_KV_CACHE_LAYOUT VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT
        """,
    ),
    "attention_backend": Pair("names of the backends in use"),
    "attention": Pair(
        "quantized queries, and how a sparse model chooses tokens "
        "(`use_prefill_query_quantization`, `indexer_kv_dtype`)",
        AttentionConfig="""
            disable_flashinfer_q_quantization indexer_kv_dtype indexer_sparse_logits
            minimax_m3_indexer_cp minimax_m3_msa_decode_backend sparse_mla_force_mqa
            trtllm_ragged_backend use_fp4_indexer_cache use_non_causal
            use_prefill_query_quantization use_trtllm_attention
        """,
        KernelConfig="sparse_indexer_topk_backend",
    ),
    "kernels": Pair(
        "kernels for experts and linear layers that an operator has chosen (`moe_backend`, "
        "`linear_backend`, `VLLM_USE_DEEP_GEMM_E8M0`); if weights or the cache are quantized, the "
        "GPU's compute capability, by which vLLM chooses to how many bits activations are rounded",
        KernelConfig="""
            enable_bf16x3_router_gemm linear_backend linear_backend_per_quant moe_backend
            monokernel
        """,
        ParallelConfig="all2all_backend",
        environment="""
            VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CPU_SGL_KERNEL VLLM_DISABLED_KERNELS
            VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MOE_USE_DEEP_GEMM VLLM_ROCM_FP8_MFMA_PAGE_ATTN
            VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_FP4_ASM_GEMM
            VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_MOE VLLM_TEST_FORCE_FP8_MARLIN
            VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_FLASHINFER_MOE_INT4
            VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC
        """,
    ),
    "environment": Pair(
        "variables that reduce precision (`VLLM_MARLIN_INPUT_DTYPE`, `VLLM_CPU_INT4_W4A8`, "
        "`VLLM_FLOAT32_MATMUL_PRECISION`)",
        environment="""
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
        os_environ="FLA_TRIL_PRECISION FLA_USE_FAST_OPS MINIMAX_KVFP4_FP8_PAIR_DEQUANT",
    ),
    "lora": Pair(
        "how an adapter is read, and to which modules it applies",
        LoRAConfig="""
            enable_mixed_moe_lora_format enable_moe_shared_loras enable_tower_connector_lora
            lora_dtype target_modules
        """,
    ),
    "draft": Pair(
        "weights and config of the draft model (EAGLE, MTP, a draft model), and how it runs "
        "(`parallel_drafting`, `moe_backend`)",
        SpeculativeConfig="""
            attention_backend disable_lookahead_block_hashes draft_tensor_parallel_size
            index_share_for_mtp_iteration kv_cache_dtype moe_backend parallel_drafting
            use_heterogeneous_vocab
        """,
        environment="VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
    ),
    "code": Pair(
        "classes and passes of others",
        ParallelConfig="worker_cls worker_extension_cls sd_worker_cls",
        CompilationConfig="inductor_passes",
    ),
    "platform_config": Pair("", VllmConfig="additional_config"),
    "block_hash": Pair("the hash algorithm"),
    "tensor_parallel": Pair("the split; `any` of shares of heads, as with `share_across_tp`"),
    "kv_shares": Pair("how many shares of heads there are in all"),
    "pipeline_parallel": Pair("the split"),
    "layer_split": Pair("which layers are in which stage", environment="VLLM_PP_LAYER_PARTITION"),
    "rank": Pair(
        "the worker's; where several ranks hold the same bytes (MLA, fewer KV heads than ranks), "
        "`shard I of N`, equal for them; of shares of heads, `stage I of N`"
    ),
}
