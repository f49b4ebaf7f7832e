"""Triton kernels. Host functions take allocated, checked tensors and launch; `titan_fp8moe.ops` does the rest."""
