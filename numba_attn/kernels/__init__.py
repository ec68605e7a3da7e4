"""The registered kernels, in order of preference: this tuple is the registration."""

from numba_attn.kernels import flash_fp32, split_keys_fp32, unfused_fp32, warp_tile_fp32

KERNELS = (split_keys_fp32.KERNEL, flash_fp32.KERNEL, unfused_fp32.KERNEL, warp_tile_fp32.KERNEL)
