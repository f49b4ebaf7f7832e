"""SwiGLU kernels against the reference: byte for byte on the GPU, to rounding when interpreted on the CPU.

The interpreter is chosen when triton is imported, hence the process of its own: this file, run as a script.
"""

import os
import subprocess
import sys

import numpy
import pytest
import torch
import triton
from test_quantize_kernels import CUDA, Guarded, around_the_rounding_of_scales, assert_same, data, group_ends, groups

from titan_fp8moe import reference
from titan_fp8moe.float8 import FP8_DTYPE, padded_tokens, scale_from_amax
from titan_fp8moe.reference import padded_offs


def forward(gate_up, pow2, q_dtype=FP8_DTYPE):
    from titan_fp8moe.kernels import swiglu

    m, h = gate_up.shape[0], gate_up.shape[1] // 2
    device = gate_up.device
    outputs = Guarded((m, h), q_dtype, device), Guarded((m,), torch.float32, device)
    swiglu.swiglu_quantize_rowwise(gate_up, *(output.t for output in outputs), pow2)
    for output in outputs:
        output.check()
    return tuple(output.t for output in outputs)


def backward_outputs(m, h, q_dtype, device):
    return (
        Guarded((m, 2 * h), q_dtype, device),
        Guarded((m,), torch.float32, device),
        Guarded((m, h), q_dtype, device),
        Guarded((m,), torch.float32, device),
    )


def backward(grad_h, gate_up, pow2, q_dtype=FP8_DTYPE):
    from titan_fp8moe.kernels import swiglu_backward

    m, h = grad_h.shape
    device = gate_up.device
    outputs = backward_outputs(m, h, q_dtype, device)
    swiglu_backward.swiglu_backward_quantize_rowwise(grad_h, gate_up, *(output.t for output in outputs), pow2)
    for output in outputs:
        output.check()
    return tuple(output.t for output in outputs)


def both_ways(grad_h, gate_up, offs, pow2):
    from titan_fp8moe.kernels import swiglu_backward

    (m, h), num_groups = grad_h.shape, offs.shape[0]
    device, p = gate_up.device, padded_tokens(m, num_groups)
    rows, columns = backward_outputs(m, h, FP8_DTYPE, device), []
    for k in (2 * h, h):
        columns += [Guarded((p, k), FP8_DTYPE, device, (1, p)), Guarded((num_groups, k), torch.float32, device)]
    amax = [Guarded((num_groups, k), torch.int32, device) for k in (2 * h, h)]
    for workspace in amax:
        workspace.t.zero_()
    outputs = (*rows, *columns, *amax)
    padded = padded_offs(offs)
    swiglu_backward.swiglu_backward_quantize(grad_h, gate_up, offs, padded, *(output.t for output in outputs), pow2)
    for output in outputs:
        output.check()
    return tuple(output.t for output in (*rows[:2], *columns))


def check_both_ways(grad_h, gate_up, offs, pow2):
    want = reference.swiglu_backward_quantize(grad_h, gate_up, offs, padded_offs(offs), pow2)
    for i, (g, w) in enumerate(zip(both_ways(grad_h, gate_up, offs, pow2), want, strict=True)):
        assert_same(g, w, f"both ways output {i} {tuple(grad_h.shape)} {grad_h.dtype} {offs.tolist()[:6]} pow2={pow2}")


def check(grad_h, gate_up, pow2):
    want = reference.swiglu_quantize_rowwise(gate_up, pow2)
    for i, (g, w) in enumerate(zip(forward(gate_up, pow2), want, strict=True)):
        assert_same(g, w, f"forward output {i} {tuple(grad_h.shape)} {grad_h.dtype} pow2={pow2}")
    want = reference.swiglu_backward_quantize_rowwise(grad_h, gate_up, pow2)
    for i, (g, w) in enumerate(zip(backward(grad_h, gate_up, pow2), want, strict=True)):
        assert_same(g, w, f"backward output {i} {tuple(grad_h.shape)} {grad_h.dtype} pow2={pow2}")


def inputs(m, h, dtype, device, kind):
    """Gradient of h and [gate | up]; kind "gates" spreads the gates over all that exp tells from 0 and infinity."""
    gate_up = data((m, 2 * h), dtype, device, "normal" if kind == "gates" else kind, seed=1)
    if kind == "gates":
        gate_up[:, :h] *= 45
    return data((m, h), dtype, device, kind if kind == "nonfinite" else "range"), gate_up


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "m, h",
    [
        (0, 64),
        (1, 48),
        (77, 512),
        (333, 1408),
        (200, 2048),
        (100, 2880),
        (64, 5120),
        (97, 8192),
        (40, 14336),
        (30, 16384),
        (20, 16400),
    ],
)
def test_swiglu(m, h, dtype, pow2):
    for kind in ("normal", "gates", "range", "nonfinite"):
        grad_h, gate_up = inputs(m, h, dtype, "cuda", kind)
        check(grad_h, gate_up, pow2)
        for layout in ("one", "ragged", "singles", "empty") if m > 0 else ():
            check_both_ways(grad_h, gate_up, groups(m, layout, "cuda"), pow2)


def exact_around_the_rounding_of_scales(device):
    """grad_h and [gate | up] whose d_up and h are exact: the sigmoid of 64 is one."""
    values = around_the_rounding_of_scales(device)
    return values, torch.cat((torch.full_like(values, 64.0), values), 1)


@pytest.mark.gpu
@CUDA
def test_scales_of_columns_round_up_where_they_should():
    check_both_ways(*exact_around_the_rounding_of_scales("cuda"), group_ends([3], "cuda"), True)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("pow2", [True, False])
def test_every_bf16_gate(pow2):
    gate = torch.arange(65536, device="cuda").to(torch.uint16).view(torch.bfloat16).view(4096, 16)
    for up in (1.0, -3e38, 1e-38):
        up = torch.full_like(gate, up)
        check(up, torch.cat((gate, up), 1), pow2)


@pytest.mark.gpu
@CUDA
def test_very_negative_gates_give_zeros():
    gate_up = torch.full((8, 96), 2.0, device="cuda")
    gate_up[:, :48] = -torch.logspace(2, 38, 8, device="cuda")[:, None]
    for output in (*forward(gate_up, True), *backward(gate_up[:, 48:], gate_up, True)):
        if output.dtype == FP8_DTYPE:
            assert not output.float().any()
        else:
            assert (output == 2.0**-126).all()


@pytest.mark.gpu
@CUDA
def test_row_strides():
    grad_h, gate_up = inputs(150, 256, torch.bfloat16, "cuda", "range")
    wide_grad, wide_gate_up = grad_h.new_zeros(150, 320), gate_up.new_zeros(150, 640)
    wide_grad[:, 16:272], wide_gate_up[:, 64:576] = grad_h, gate_up
    check(wide_grad[:, 16:272], wide_gate_up[:, 64:576], True)
    check(grad_h[:1].expand(150, -1), gate_up[:1].expand(150, -1), True)


@pytest.mark.gpu
@CUDA
def test_more_than_2_31_elements():
    h = 8192
    m = 2**31 // h + 64  # of grad_h; gate_up and q have twice as many
    gate_up = torch.zeros((m, 2 * h), dtype=torch.bfloat16, device="cuda")
    grad_h = torch.zeros((m, h), dtype=torch.bfloat16, device="cuda")
    grad_tail, gate_up_tail = inputs(64, h, torch.bfloat16, "cuda", "normal")
    grad_h[-64:], gate_up[-64:] = grad_tail, gate_up_tail
    for g, w in zip(forward(gate_up, True), reference.swiglu_quantize_rowwise(gate_up_tail), strict=True):
        assert_same(g[-64:], w, "forward")
    want = reference.swiglu_backward_quantize_rowwise(grad_tail, gate_up_tail)
    for g, w in zip(backward(grad_h, gate_up, True), want, strict=True):
        assert_same(g[-64:], w, "backward")
    del g
    groups_of_tail = group_ends([m - 64, 40, 24], "cuda")
    got = both_ways(grad_h, gate_up, groups_of_tail, True)
    ends = group_ends([0, 40, 24], "cuda")
    want = reference.swiglu_backward_quantize(grad_tail, gate_up_tail, ends, padded_offs(ends))
    start = (m - 64 + 127) // 128 * 128
    for g, w in zip((got[2], got[4]), (want[2], want[4]), strict=True):
        assert_same(g[start : start + 256], w[:256], "both ways")
    for g, w in zip((got[3], got[5]), (want[3], want[5]), strict=True):
        assert_same(g, w, "scales of columns")


@pytest.mark.gpu
@CUDA
def test_one_compiled_kernel_for_any_number_of_tokens():
    from titan_fp8moe.kernels import swiglu, swiglu_backward

    def count():
        kernels = (swiglu._swiglu_kernel, swiglu_backward._swiglu_backward_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for i, m in enumerate((256, 1, 16, 17, 333, 5000, 2)):
        grad_h, gate_up = inputs(m, 256, torch.bfloat16, "cuda", "normal")
        forward(gate_up, True)
        backward(grad_h, gate_up, True)
        both_ways(grad_h, gate_up, group_ends([m // 2, m - m // 2], "cuda"), True)
        if i == 0:
            compiled = count()
    assert count() == compiled


@pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and numpy.lib.NumpyVersion(numpy.__version__) >= "2.4.0",
    reason="triton 3.6's interpreter cannot run loops with numpy 2.4: it converts arrays of one element to integers",
)
def test_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def _check_interpreted():
    # libdevice is machine code, and the exp of numpy is not that of torch to the last bit: a tolerance, which the
    # zero of the derivative of silu widens.
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.exp = lambda x: tl.exp(x)
    libdevice.fast_dividef = lambda x, y: x / y
    for m, h in ((1, 48), (17, 80), (5, 1408), (0, 32), (2, 16400)):
        for kind, dtype, pow2 in (
            ("normal", torch.float32, True),
            ("gates", torch.float32, False),
            ("nonfinite", torch.float32, True),
        ):
            grad_h, gate_up = inputs(m, h, dtype, "cpu", kind)
            d_gate, d_up, want_h = reference.swiglu_backward(grad_h, gate_up)
            q, scale = forward(gate_up, pow2, torch.float32)
            results = [(q, scale, want_h)]
            q, scale, q_h, scale_h = backward(grad_h, gate_up, pow2, torch.float32)
            results += [(q, scale, torch.cat((d_gate, d_up), 1)), (q_h, scale_h, want_h)]
            for q, scale, want in results:
                finite = want.isfinite().all(1)
                assert torch.equal(scale.isfinite(), finite)
                assert not (q[~finite].isfinite()).any()
                q, scale, want = q[finite], scale[finite], want[finite]
                torch.testing.assert_close(q.double(), want.double() / scale.double()[:, None], rtol=1e-3, atol=1e-30)
                amax = q.abs().amax(1)
                assert ((amax <= 448 * 1.00001) & ((amax >= 223.9) | (scale == 2.0**-126))).all()
            for layout in ("ragged", "singles", "empty") if m > 0 else ():
                check_interpreted_amax(
                    grad_h, gate_up, groups(m, layout, "cpu"), (torch.cat((d_gate, d_up), 1), want_h)
                )
    values = exact_around_the_rounding_of_scales("cpu")
    d_gate, d_up, want_h = reference.swiglu_backward(*values)
    amax, amax_h = check_interpreted_amax(*values, group_ends([3], "cpu"), (torch.cat((d_gate, d_up), 1), want_h))
    for got, want in ((amax[:, 16:], d_up), (amax_h, want_h)):
        assert_same(scale_from_amax(got[0]), scale_from_amax(want.abs().amax(0)), "scales of columns")


def check_interpreted_amax(grad_h, gate_up, offs, exact):
    """What becomes the scales of columns; the move to them is written in assembly, which the interpreter has not."""
    from titan_fp8moe.kernels import swiglu_backward

    m, h = grad_h.shape
    outputs = backward_outputs(m, h, torch.float32, "cpu")
    amax = [Guarded((offs.shape[0], k), torch.int32, "cpu") for k in (2 * h, h)]
    for workspace in amax:
        workspace.t.zero_()
    arguments = (output.t for output in (*outputs, *amax))
    swiglu_backward._launch_swiglu_backward(grad_h, gate_up, offs, *arguments, True)
    for output in (*outputs, *amax):
        output.check()
    for workspace, values in zip(amax, exact, strict=True):
        got, want = workspace.t.view(torch.float32), reference._colwise_per_group_amax(values, offs)
        assert torch.equal(got.isfinite(), want.isfinite())
        finite = want.isfinite()
        torch.testing.assert_close(got[finite], want[finite], rtol=2.0**-7, atol=1e-38)
    return tuple(workspace.t.view(torch.float32) for workspace in amax)


if __name__ == "__main__":
    _check_interpreted()
