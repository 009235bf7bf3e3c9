"""Names of the parameters of NeuronConfig in NxDI 0.9 (AWS's NxD Inference), in the order of its source.

They replace NxDI's source where that is not installed, in the double of NxDI and in tests of configuration files.
"""

from __future__ import annotations

KNOWN = frozenset(
    """
    batch_size padding_side allow_input_truncation seq_len n_active_tokens n_positions on_cpu output_logits torch_dtype
    overrides_torch_dtype cast_type rpl_reduce_dtype attention_dtype max_context_length max_new_tokens max_length
    vocab_parallel enable_cte_modular_flow layer_boundary_markers fused_qkv sequence_parallel_enabled
    weight_gather_seq_len_threshold attn_cls ctx_batch_size tkg_batch_size max_batch_size is_continuous_batching
    kv_cache_batch_size kv_cache_padding_size on_device_sampling_config async_mode enable_bucketing buckets
    bucket_n_active_tokens context_encoding_buckets prefix_buckets token_generation_buckets quantized
    quantized_checkpoints_path quantization_type quantization_dtype quantization_block_size quantization_block_axis
    quantization_scale_dtype modules_to_not_convert draft_model_modules_to_not_convert kv_cache_quant kv_quant_config
    speculation_length spec_batch_size enable_fused_speculation enable_eagle_speculation is_eagle3 is_eagle_draft
    enable_eagle_draft_input_norm token_tree_config is_medusa medusa_speculation_length num_medusa_heads medusa_tree
    is_block_kv_layout pa_num_blocks pa_block_size is_prefix_caching windowed_context_encoding_size
    chunked_prefill_config tensor_replacement_config tensor_capture_config lora_config tp_degree cp_degree mlp_cp_degree
    attention_dp_degree pp_degree ep_degree save_sharded_checkpoint skip_sharding qk_layernorm pre_rope_rmsnorm
    world_size start_rank_id local_ranks_size flash_decoding_enabled disable_kv_cache_tiling k_cache_transposed
    attn_kernel_enabled strided_context_parallel_kernel_enabled qkv_kernel_enabled qkv_nki_kernel_enabled
    qkv_cte_nki_kernel_fuse_rope qkv_kernel_nbsd_layout mlp_kernel_enabled mlp_tkg_nki_kernel_enabled
    fused_rmsnorm_skip_gamma mlp_kernel_fuse_residual_add qkv_kernel_fuse_residual_add quantized_mlp_kernel_enabled
    out_proj_kernel_enabled activation_quantization_type attn_tkg_nki_kernel_enabled attn_tkg_builtin_kernel_enabled
    attn_block_tkg_nki_kernel_enabled attn_block_cte_nki_kernel_enabled attn_block_tkg_nki_kernel_cache_update
    attn_block_tkg_nki_kernel_cascaded_attention attn_block_tkg_nki_kernel_use_online_softmax
    rmsnorm_quantize_kernel_enabled quantize_clamp_bound moe_fused_nki_kernel_enabled router_topk_nki_kernel_enabled
    expert_mlp_nki_kernel_enabled shared_mlp_nki_kernel_enabled logical_nc_config logical_neuron_cores lm_head_pad
    lm_head_pad_alignment_size cc_pipeline_tiling_factor seq_len_threshold_for_cc_tiling target enable_spill_reload_dge
    apply_seq_ids_mask skip_warmup scratchpad_page_size enable_output_completion_notifications padded_hidden_size
    padded_intermediate_size disable_numeric_cc_token switch_cc
    """.split()  # noqa: SIM905, a list of as many quoted lines would be harder to read
)
