"""The registered kernels, in order of preference: this tuple is the registration."""

from numba_attn.kernels import (
    block_per_head_fp32,
    flash_fp32,
    flash_split_half_sm80,
    flash_split_half_sm90,
    split_keys_fp32,
    unfused_fp32,
    unfused_split_half_sm80,
    unfused_split_half_sm90,
    warp_streaming_fp32,
    warp_tile_fp32,
    warp_tile_multi_fp32,
    warp_two_pass_fp32,
)

KERNELS = (
    split_keys_fp32.KERNEL,
    flash_split_half_sm90.KERNEL,
    flash_split_half_sm80.KERNEL,
    unfused_split_half_sm90.KERNEL,
    unfused_split_half_sm80.KERNEL,
    flash_fp32.KERNEL,
    unfused_fp32.KERNEL,
    warp_tile_multi_fp32.KERNEL,
    warp_tile_fp32.KERNEL,
    warp_two_pass_fp32.KERNEL,
    warp_streaming_fp32.KERNEL,
    block_per_head_fp32.KERNEL,
)
