"""Quantisation kernels against the reference, byte for byte: on the GPU, and interpreted on the CPU.

The interpreter casts to e4m3 wrongly, so there the kernels store float32 and torch does the cast. It is chosen
when triton is imported, hence the process of its own: this file, run as a script.
"""

import os
import subprocess
import sys

import pytest
import torch

from titan_fp8moe import reference
from titan_fp8moe.float8 import FP8_DTYPE, padded_tokens, round_up, scale_from_amax
from titan_fp8moe.reference import padded_offs

GUARD = 64
PATTERN = 0xA5


class Guarded:
    """A tensor of garbage inside a larger buffer of garbage, which must survive."""

    def __init__(self, size, dtype, device, stride=None):
        stride = stride or torch.empty(size, device="meta").stride()
        self.numel = max([s * n for s, n in zip(stride, size, strict=True)], default=1) if 0 not in size else 0
        itemsize = torch.empty((), dtype=dtype).itemsize
        self.buffer = torch.full((GUARD + self.numel * itemsize + GUARD,), PATTERN, dtype=torch.uint8, device=device)
        self.t = self.buffer[GUARD:].view(dtype).as_strided(size, stride) if self.numel else self.empty(size, dtype)
        self.itemsize = itemsize

    def empty(self, size, dtype):
        return torch.empty(size, dtype=dtype, device=self.buffer.device)

    def check(self):
        assert (self.buffer[:GUARD] == PATTERN).all()
        assert (self.buffer[GUARD + self.numel * self.itemsize :] == PATTERN).all()
        if self.t.dim() == 2 and self.t.stride(0) == 1 and self.numel:
            columns = self.buffer[GUARD : GUARD + self.numel * self.itemsize].view(-1, self.t.stride(1) * self.itemsize)
            # Of the padding of a column only what completes a block of 16 values may be written, with zeros.
            m = self.t.shape[0]
            padding = columns[:, m * self.itemsize : round_up(m, 16) * self.itemsize]
            assert ((padding == PATTERN) | (padding == 0)).all()
            assert (columns[:, round_up(m, 16) * self.itemsize :] == PATTERN).all()


def bits(t):
    integers = {1: torch.uint8, 4: torch.int32}
    return t.contiguous().view(integers[t.element_size()])


def assert_same(got, want, what):
    if got.dtype == torch.float32 and want.dtype == FP8_DTYPE:
        got = torch.where(got.isnan(), torch.nan, got).to(FP8_DTYPE)  # as the GPU does, whose NaN has one sign
    different = bits(got) != bits(want)
    if different.any():
        where = different.nonzero()[0].tolist()
        pytest.fail(
            f"{what}: {int(different.sum())} of {different.numel()} differ, first at {where}: "
            f"{got[tuple(where)].item()} is not {want[tuple(where)].item()}"
        )


def data(size, dtype, device, kind="normal", seed=0):
    """Values over the whole range of exponents, with rows and columns of zeros and, if wanted, what is not finite."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(size, device=device, generator=generator)
    if kind != "normal":
        for dim in (-1, -2):
            shape = list(size)
            shape[dim] = 1
            x = x * torch.exp2(torch.randint(-70, 63, shape, device=device, generator=generator).float())
        x[..., 1::7, :] = 0
        x[..., :, 3::11] = 0
        x[..., 2::13, :] *= 2.0**-100
        x[..., 5::17, 0] = 3e38
        x[..., 4::19, :] = 0.0
        x[..., 4::19, 2] = 1e-45
    if kind == "nonfinite":
        x[..., 6::23, 5] = torch.inf
        x[..., 8::29, 7] = -torch.inf
        x[..., 9::31, 9] = torch.nan
        x[..., 10::31, 11] = -torch.nan
    return x.to(dtype)


def around_the_rounding_of_scales(device):
    """(3, 16) float32 whose columns have an amax just below, at or just above 1.75 * 2**k, or zero."""
    amax = 1.75 * torch.exp2(torch.tensor([-60.0, -8.0, 0.0, 5.0, 90.0]))
    zero, infinity = torch.zeros(()), torch.tensor(torch.inf)
    amax = torch.cat((amax.nextafter(zero), amax, amax.nextafter(infinity), zero[None]))
    return torch.stack((amax / 4, -amax, amax / 2)).to(device)


def group_ends(sizes, device):
    return torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def groups(m, kind, device):
    """End offsets of M rows' groups."""
    half = m // 2
    sizes = {
        "one": [m],
        "uniform": [m // 4 // 16 * 16] * 4,
        "ragged": [0, 1, m // 3, 0, m // 5, 0],
        "skewed": [half] + [half // 15] * 15,
        "singles": [1] * min(m, 100) + [max(m - 120, 0)] + [0] * 27,
        "empty": [0, 0, 0],
        "none": [],
    }
    return group_ends(sizes[kind], device)


class Kernels:
    """The host functions with guarded, poisoned outputs; ``q_dtype`` is float32 for the interpreter."""

    def __init__(self, device, q_dtype=FP8_DTYPE):
        from titan_fp8moe.kernels import quantize_per_group, quantize_rowwise, quantize_weight

        self.rowwise, self.group, self.weight = quantize_rowwise, quantize_per_group, quantize_weight
        self.device, self.q_dtype = device, q_dtype

    def new(self, size, dtype, stride=None):
        self.outputs.append(Guarded(size, dtype, self.device, stride))
        return self.outputs[-1].t

    def row_outputs(self, x):
        return self.new(tuple(x.shape), self.q_dtype), self.new((x.shape[0],), torch.float32)

    def col_outputs(self, x, offs):
        m, k = x.shape
        self.amax = torch.zeros((offs.shape[0], k), dtype=torch.int32, device=self.device)
        q = self.new((m, k), self.q_dtype, (1, round_up(m, 16) + 16))
        return q, self.new((offs.shape[0], k), torch.float32)

    def padded_outputs(self, x, offs):
        (m, k), num_groups = x.shape, offs.shape[0]
        self.amax = torch.zeros((num_groups, k), dtype=torch.int32, device=self.device)
        p = padded_tokens(m, num_groups)
        return self.new((p, k), self.q_dtype, (1, p)), self.new((num_groups, k), torch.float32)

    def check_guards(self):
        for output in self.outputs:
            output.check()

    def __call__(self, name, *args, pow2):
        self.outputs = []
        outputs = getattr(self, name)(*args, pow2=pow2)
        self.check_guards()
        return outputs

    def quantize_rowwise(self, x, pow2):
        outputs = self.row_outputs(x)
        self.rowwise.quantize_rowwise(x, *outputs, pow2)
        return outputs

    def quantize_colwise_per_group(self, x, offs, padded=None, *, pow2):
        outputs = self.col_outputs(x, offs) if padded is None else self.padded_outputs(x, offs)
        self.group.quantize_colwise_per_group(x, offs, padded, *outputs, self.amax, pow2)
        return outputs

    def quantize_rowwise_and_colwise_per_group(self, x, offs, pow2):
        outputs = *self.row_outputs(x), *self.padded_outputs(x, offs)
        self.group.quantize_rowwise_and_colwise_per_group(x, offs, padded_offs(offs), *outputs, self.amax, pow2)
        return outputs

    def requantize_colwise_per_group(self, q, scale, offs, pow2):
        outputs = self.padded_outputs(q, offs)
        self.group.requantize_colwise_per_group(q, scale, offs, padded_offs(offs), *outputs, self.amax, pow2)
        return outputs

    def weight_outputs(self, e, k, n):
        return (
            self.new((e, k, n), self.q_dtype, (k * n, 1, k)),
            self.new((e, n), torch.float32),
            self.new((e, n, k), self.q_dtype, (k * n, 1, n)),
            self.new((e, k), torch.float32),
        )

    def amax_of(self, e, size):
        return torch.zeros((e, size), dtype=torch.int32, device=self.device)

    def quantize_weight_colwise(self, w_t, pow2):
        e, k, n = w_t.shape
        outputs = self.weight_outputs(e, k, n)[:2]
        self.weight.quantize_weight_colwise(w_t, *outputs, self.amax_of(e, n), pow2)
        return outputs

    def quantize_weight_rowwise(self, w_t, pow2):
        e, k, n = w_t.shape
        outputs = self.weight_outputs(e, k, n)[2:]
        self.weight.quantize_weight_colwise(w_t.transpose(1, 2), *outputs, self.amax_of(e, k), pow2)
        return outputs

    def quantize_weight(self, *weights, pow2):
        e, k, _ = weights[0].shape
        outputs = self.weight_outputs(e, k, sum(w_t.shape[2] for w_t in weights))
        self.weight.quantize_weight(weights, *outputs, self.amax_of(e, k), pow2)
        return outputs


def check_activations(kernels, x, offs, pow2, q_is_fp8=True):
    def same(name, want, *args):
        got = kernels(name, *args, pow2=pow2)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{name} output {i} {tuple(x.shape)} {x.dtype} {offs.tolist()[:6]} pow2={pow2}")

    q, scale = reference.quantize_rowwise(x, pow2)
    same("quantize_rowwise", (q, scale), x)
    for padded in (None, padded_offs(offs)):
        want = reference.quantize_colwise_per_group(x, offs, pow2, padded)
        same("quantize_colwise_per_group", want, x, offs, padded)
    # Rescaling is written in assembly, which the interpreter has not; the operators see to it that there are groups.
    if offs.numel() > 0 and (q_is_fp8 or not pow2):
        padded = padded_offs(offs)
        both = reference.quantize_rowwise_and_colwise_per_group(x, offs, padded, pow2)
        same("quantize_rowwise_and_colwise_per_group", both, x, offs)
        want = reference.requantize_colwise_per_group(q, scale, offs, padded, pow2)
        same("requantize_colwise_per_group", want, q if q_is_fp8 else q.float(), scale, offs)


def check_weights(kernels, w_t, pow2, q_is_fp8=True):
    def same(name, got, want):
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            assert_same(g, w, f"{name} output {i} {tuple(w_t.shape)} {w_t.stride()} {w_t.dtype} pow2={pow2}")

    same("colwise", kernels("quantize_weight_colwise", w_t, pow2=pow2), reference.quantize_weight_colwise(w_t, pow2))
    same("rowwise", kernels("quantize_weight_rowwise", w_t, pow2=pow2), reference.quantize_weight_rowwise(w_t, pow2))
    if q_is_fp8 or not pow2:
        both = reference.quantize_weight(w_t, pow2)
        same("both", kernels("quantize_weight", w_t, pow2=pow2), both)
        n = w_t.shape[2] // 48 * 16
        same("joint", kernels("quantize_weight", w_t[:, :, :n], w_t[:, :, n:], pow2=pow2), both)


CUDA = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of SM90 or above"
)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["normal", "range", "nonfinite"])
@pytest.mark.parametrize("m, k", [(1, 48), (77, 5136), (1000, 2880), (1536, 5120), (130, 16400), (0, 64)])
def test_activations(m, k, kind, dtype, pow2):
    kernels = Kernels("cuda")
    x = data((m, k), dtype, "cuda", kind)
    for split in ("one", "uniform", "ragged", "skewed", "singles", "empty", "none"):
        offs = groups(m, split, "cuda")
        if offs.numel() and int(offs[-1]) > m:
            continue
        check_activations(kernels, x, offs, pow2)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_round_up_where_they_should(dtype):
    kernels = Kernels("cuda")
    x = around_the_rounding_of_scales("cuda").to(dtype)
    for rows in (x, x.t().contiguous().repeat(1, 16)):
        check_activations(kernels, rows, group_ends([rows.shape[0]], "cuda"), True)


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides(dtype):
    kernels = Kernels("cuda")
    offs = groups(333, "ragged", "cuda")
    wide = data((333, 2 * 192), dtype, "cuda", "range")
    tall = data((192, 333), dtype, "cuda", "range")
    for x in (tall.t(), wide[:, ::2], wide[:, 96:288], wide[:1, :192].expand(333, 192), wide[:, :1].expand(333, 192)):
        check_activations(kernels, x, offs, True)
    aligned = data((192, 640), dtype, "cuda", "range")
    check_activations(kernels, aligned.t(), groups(640, "uniform", "cuda"), True)


@pytest.mark.gpu
@CUDA
def test_rows_of_no_group_do_not_matter():
    kernels = Kernels("cuda")
    x = data((300, 192), torch.bfloat16, "cuda")
    offs = group_ends([100, 60], "cuda")
    want = kernels("quantize_colwise_per_group", x, offs, pow2=True)
    x[160:] = torch.nan
    got = kernels("quantize_colwise_per_group", x, offs, pow2=True)
    assert_same(got[0], want[0], "q")
    assert_same(got[1], want[1], "scale")
    assert not bits(got[0][160:]).any()


@pytest.mark.gpu
@CUDA
def test_bad_offs_stay_inside_the_tensors():
    kernels = Kernels("cuda")
    x = data((300, 192), torch.bfloat16, "cuda")
    for ends in ([200, 100, 250], [-5, 100, 5000], [2**31 - 1, -(2**31), 7]):
        offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
        kernels("quantize_colwise_per_group", x, offs, pow2=True)
        kernels("quantize_colwise_per_group", x, offs, padded_offs(offs), pow2=True)
        kernels("quantize_rowwise_and_colwise_per_group", x, offs, pow2=True)
        torch.cuda.synchronize()


@pytest.mark.gpu
@CUDA
@pytest.mark.parametrize("pow2", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("e, k, n", [(1, 48, 96), (3, 2880, 144), (2, 5136, 720), (0, 48, 48), (5, 16400, 96)])
def test_weights(e, k, n, dtype, pow2):
    kernels = Kernels("cuda")
    for kind in ("normal", "nonfinite"):
        check_weights(kernels, data((e, n, k), dtype, "cuda", kind).transpose(1, 2), pow2)
        check_weights(kernels, data((e, k, n), dtype, "cuda", kind), pow2)
    check_weights(kernels, data((e, n, 2 * k), dtype, "cuda")[:, :, ::2].transpose(1, 2), pow2)


@pytest.mark.gpu
@CUDA
def test_full_size_byte_for_byte():
    kernels = Kernels("cuda")
    x = data((16384, 8192), torch.bfloat16, "cuda")
    for split in ("skewed", "singles"):
        check_activations(kernels, x, groups(16384, split, "cuda"), True)
    check_weights(kernels, data((4, 5120, 8192), torch.bfloat16, "cuda").transpose(1, 2), True)


@pytest.mark.gpu
@CUDA
def test_more_than_2_31_elements():
    kernels = Kernels("cuda")
    x = torch.empty((2**31 // 8192 + 512, 8192), dtype=torch.bfloat16, device="cuda")
    x.copy_(data((1, 8192), torch.bfloat16, "cuda"))
    tail = x[-256:].copy_(data((256, 8192), torch.bfloat16, "cuda", "range"))
    offs = group_ends([x.shape[0] - 256, 256], "cuda")
    last = group_ends([256], "cuda")
    want = reference.quantize_rowwise_and_colwise_per_group(tail, last, padded_offs(last))
    got = kernels("quantize_rowwise_and_colwise_per_group", x, offs, pow2=True)
    first = int(padded_offs(offs)[0])
    moved = kernels("requantize_colwise_per_group", *got[:2], offs, pow2=True)
    want_moved = reference.requantize_colwise_per_group(*want[:2], last, padded_offs(last))
    got = got[0][-256:], got[1][-256:], got[2][first : first + 256], got[3][1:]
    for g, w in zip(got, (*want[:2], want[2][:256], want[3]), strict=True):
        assert_same(g, w, "tail")
    assert_same(moved[0][first : first + 256], want_moved[0][:256], "tail, moved")
    assert_same(moved[1][1:], want_moved[1], "tail, moved")
    del moved
    w_t = x.view(2, -1, 8192).transpose(1, 2)
    got = kernels("quantize_weight", w_t, pow2=True)
    want = reference.quantize_weight(w_t[1:])
    for g, w in zip(got, want, strict=True):
        assert_same(g[1:], w, "last expert")


@pytest.mark.gpu
@CUDA
def test_one_compiled_kernel_for_any_number_of_tokens():
    from titan_fp8moe.kernels import rescale

    kernels = Kernels("cuda")
    jitted = (
        kernels.rowwise._rowwise_and_colwise_amax_kernel,
        kernels.group._cast_colwise_kernel,
        kernels.group._colwise_amax_kernel,
        rescale._rescale_kernel,
    )

    def count():
        return sum(len(cache[0]) for kernel in jitted for cache in kernel.device_caches.values())

    for i, m in enumerate((256, 1, 16, 17, 100, 333, 1024, 5000, 2, 129)):
        x = data((m, 256), torch.bfloat16, "cuda")
        offs = groups(m, "one", "cuda")
        kernels("quantize_rowwise_and_colwise_per_group", x, offs, pow2=True)
        for padded in (None, padded_offs(offs)):
            kernels("quantize_colwise_per_group", x, offs, padded, pow2=True)
        if i == 0:
            compiled = count()
    assert count() == compiled


@pytest.mark.slow
def test_interpreted():
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]


def check_interpreted_amax(kernels, x, offs):
    """Rows, and what becomes the scales of columns; the move to them is written in assembly."""
    kernels.outputs = []
    q, scale = kernels.row_outputs(x)
    amax = kernels.new((offs.shape[0], x.shape[1]), torch.int32).zero_()
    kernels.rowwise.launch_rowwise_and_colwise_amax(
        x, offs, q, scale, amax, (1, *x.shape), (0, *x.stride()), (0, q.stride(0)), 0, True
    )
    kernels.check_guards()
    want = reference.quantize_colwise_per_group(x, offs)[1]
    for got, expected in zip((q, scale), reference.quantize_rowwise(x), strict=True):
        assert_same(got, expected, "rows")
    assert_same(scale_from_amax(amax.view(torch.float32)), want, "scales of columns")


def _check_interpreted():
    kernels = Kernels("cpu", torch.float32)
    rows = around_the_rounding_of_scales("cpu")
    check_interpreted_amax(kernels, rows, group_ends([2, 1], "cpu"))
    check_interpreted_amax(kernels, rows.t().contiguous().repeat(1, 16), group_ends([10], "cpu"))
    for kind in ("normal", "range", "nonfinite"):
        check_interpreted_amax(kernels, data((70, 1104), torch.float32, "cpu", kind), groups(70, "ragged", "cpu"))
    for m, k, split, kind, pow2 in (
        (1, 48, "one", "normal", True),
        (150, 80, "ragged", "normal", True),
        (150, 80, "singles", "nonfinite", True),
        (70, 80, "ragged", "nonfinite", False),
        (20, 48, "empty", "range", True),
        (20, 48, "none", "range", True),
        (0, 32, "empty", "normal", True),
        (3, 16400, "one", "range", True),
    ):
        x = data((m, k), torch.float32, "cpu", kind)
        check_activations(kernels, x, groups(m, split, "cpu"), pow2, q_is_fp8=False)
    x = data((48, 150), torch.float32, "cpu", "range")
    check_activations(kernels, x.t(), groups(150, "ragged", "cpu"), True, q_is_fp8=False)
    check_weights(kernels, data((2, 96, 48), torch.float32, "cpu", "nonfinite").transpose(1, 2), True, False)
    check_weights(kernels, data((2, 48, 96), torch.float32, "cpu", "nonfinite"), False, False)


if __name__ == "__main__":
    _check_interpreted()
