"""Launches by what was compiled before: for other arguments it must not be."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import launch


@triton.jit
def _fill_kernel(x_ptr, out_ptr, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i).to(tl.float32) if x_ptr is not None else tl.zeros((BLOCK,), tl.float32)
    tl.store(out_ptr + i, x + ADD)
    tl.store(out_ptr + BLOCK, n)


@pytest.mark.gpu
def test_no_launch_runs_what_was_compiled_for_other_arguments():
    data = torch.arange(80, device="cuda") % 64
    inputs = [None] + [data.to(dtype)[start:] for dtype in (torch.float32, torch.bfloat16) for start in (0, 1, 16)]
    values = (1, 2, 16, 48, 2**31 - 1, 2**31, 2**31 + 1, 2**40)
    for _ in range(2):
        for x, n, add, block in itertools.product(inputs, values, (0, 5), (16, 32)):
            out = torch.full((64,), -1.0, device="cuda", dtype=torch.float64)
            launch(_fill_kernel, (1, 1, 1), (x, out, n), (add, block), num_warps=1)
            expected = torch.full_like(out, -1.0)
            expected[:block] = add if x is None else x[:block].double() + add
            expected[block] = n
            torch.testing.assert_close(out, expected, rtol=0, atol=0)
