"""Attention by the flash-attn library; everything else by our Triton kernels."""
