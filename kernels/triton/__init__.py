"""Kernels for NVIDIA GPUs, written in Triton.

Nothing outside this folder and `kernels.flash` imports Triton, and these modules are imported
only when a Triton or flash-attn backend is asked for, so a CPU machine needs no Triton.
`TRITON_INTERPRET=1`, set before the first import, runs every kernel on CPU tensors.
"""

import os

# Triton 3.10 ceases to fuse multiply-adds of kernels that do not say; attention lives by them.
# Kernels whose results are defined operation by operation say that they are not to be fused.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
