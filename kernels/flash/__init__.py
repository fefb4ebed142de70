"""Attention by the flash-attn library; everything else by the Triton kernels."""
