"""Random shapes, strides, dtypes, group layouts and values against definitions in float64 that share no code with the
package, and against what must not change a result.

``--hypothesis-profile=long`` tries 10,000 examples of each property.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics import end_offsets, normal, sqnr_db
from torch import Tensor

from titan_fp8moe import float8_experts, float8_grouped_mm, ops
from titan_fp8moe.reference import padded_offs

# The device is all that a test's fixtures give, and it is the same for every example.
fuzz = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

FLOAT32_MAX = torch.finfo(torch.float32).max
SCALE_MIN = 2.0**-126
INPUT_LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")
VALUE_KINDS = (
    "zero row",
    "zero column",
    "tiny row",
    "denormal column",
    "huge column",
    "outlier in a quiet row",
    "rounded up under an outlier",
    "ties",
    "negative zeros",
    "inf",
    "-inf",
    "nan",
)

# Up to more blocks of a sum than the GEMM keeps in flight, and rows of more than one power of two.
dims = st.sampled_from([16, 32, 48, 80, 144, 272, 1040])
dtypes = st.sampled_from([torch.bfloat16, torch.float32])
seeds = st.integers(0, 2**16)
recipes = st.sampled_from(["rowwise", "rowwise_with_gw_hp"])
fillers = st.sampled_from([0.0, 1.0, 1e-45, 3e38, -3e38, torch.inf, -torch.inf, torch.nan])


@dataclass(frozen=True)
class Groups:
    """Sizes of the token groups, and how many rows follow them."""

    sizes: tuple[int, ...]
    slack: int

    @property
    def total(self) -> int:
        return sum(self.sizes)

    @property
    def num_rows(self) -> int:
        return self.total + self.slack

    def slices(self) -> list[slice]:
        ends = torch.tensor(self.sizes).cumsum(0).int().tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


@st.composite
def groups(draw) -> Groups:
    layout = draw(st.sampled_from(["mixed", "mixed", "one expert has all", "all empty", "no experts"]))
    if layout == "no experts":
        sizes = []
    else:
        sizes = [0] * draw(st.integers(1, 6))
    if layout == "one expert has all":
        sizes[draw(st.integers(0, len(sizes) - 1))] = draw(st.integers(1, 180))
    if layout == "mixed":
        size = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 32]) | st.integers(0, 32)
        sizes = draw(st.lists(size, min_size=len(sizes), max_size=len(sizes)))
    return Groups(tuple(sizes), draw(st.sampled_from([0, 1, 5, 16, 20])))


@dataclass(frozen=True)
class Values:
    """What a matrix holds: normal values of one magnitude, and kinds of trouble at fractions of its two axes."""

    seed: int
    magnitude: float
    trouble: tuple[tuple[str, float, float], ...]
    dtype: torch.dtype
    layout: str

    def build(self, *shape: int, device: torch.device) -> Tensor:
        x = normal(*shape, seed=self.seed) * self.magnitude
        for kind, row, column in self.trouble:
            if x.numel() > 0:
                # For weights, of a shape with a leading axis, only some matrices are hit.
                _add(kind, x[int(row * shape[0])] if len(shape) == 3 else x, row, column)
        return arranged(x.to(device, self.dtype), self.layout)


@st.composite
def values(draw, finite: bool = False, layouts: tuple[str, ...] = INPUT_LAYOUTS) -> Values:
    kinds = [kind for kind in VALUE_KINDS if not (finite and kind in ("inf", "-inf", "nan"))]
    fraction = st.floats(0, 1, exclude_max=True, width=16)
    trouble = st.lists(st.tuples(st.sampled_from(kinds), fraction, fraction), max_size=4)
    return Values(
        draw(seeds),
        draw(st.sampled_from([1.0, 1.0, 1e-42, 1e-38, 1e-30, 1e-20, 1e-4, 1e4, 1e15, 1e30])),
        tuple(draw(trouble)),
        draw(dtypes),
        draw(st.sampled_from(layouts)),
    )


# As at initialisation, where what comes out has the magnitude of what went in.
ordinary = st.builds(
    Values,
    seed=seeds,
    magnitude=st.sampled_from([1.0, 0.5, 2.0]),
    trouble=st.lists(
        st.tuples(
            st.sampled_from(["zero row", "outlier in a quiet row", "negative zeros"]), st.just(0.3), st.just(0.6)
        ),
        max_size=2,
    ).map(tuple),
    dtype=dtypes,
    layout=st.sampled_from(INPUT_LAYOUTS[:-1]),
)


def _add(kind: str, x: Tensor, row: float, column: float) -> None:
    i, j = int(row * x.shape[0]), int(column * x.shape[1])
    if kind == "zero row":
        x[i] = 0
    elif kind == "zero column":
        x[:, j] = 0
    elif kind == "tiny row":
        x[i] *= 1e-30
    elif kind == "denormal column":
        x[:, j] = torch.linspace(-1, 1, x.shape[0]) * 1e-39
    elif kind == "huge column":
        x[:, j] = torch.linspace(-1, 1, x.shape[0]) * 3e38
    elif kind == "outlier in a quiet row":
        x[i] *= 1e-3
        x[i, j] = 1e3
    elif kind == "rounded up under an outlier":
        # Alone in its column, whose scale is made for less than what the row's scale rounds it to.
        x[i], x[:, j - 1] = 0, 0
        x[i, j], x[i, j - 1] = 448, 1.74 * 2.0**-9
    elif kind == "ties":
        x[i] = (torch.arange(x.shape[1]) % 64 - 32) / 16 * 1.0625
    elif kind == "negative zeros":
        x[i] = -0.0
    else:
        x[i, j] = float(kind)


def arranged(x: Tensor, layout: str) -> Tensor:
    """The values of ``x`` in other strides; where memory is skipped it holds NaN. Expanded rows repeat the first."""
    if layout == "transposed":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if layout == "sliced":
        base = x.new_full((*x.shape[:-2], 2 * x.shape[-2] + 1, 2 * x.shape[-1] + 1), torch.nan)
        view = base[..., 1::2, 1::2]
        return view.copy_(x)
    if layout == "expanded":
        return x[..., :1, :].expand(x.shape)
    return x


# ---- definitions -----------------------------------------------------------------------------------------------------


def round_to_e4m3(v: Tensor) -> Tensor:
    """Nearest value with four significant bits and no exponent below -6, ties to even; float64."""
    _, exponent = torch.frexp(v)
    step = torch.ldexp(torch.ones_like(v), exponent.clamp(-5, 16) - 4)
    return torch.round(v / step) * step


def decoded(q: Tensor) -> Tensor:
    """e4m3 bytes to float64 by the definition of the format."""
    byte = q.cpu().view(torch.uint8).int()
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    one = torch.ones(byte.shape, dtype=torch.float64)
    fraction = torch.where(exponent > 0, 8 + mantissa, mantissa)
    value = torch.ldexp(one, exponent.clamp_min(1) - 10) * fraction * (1 - 2 * sign)
    return torch.where((byte & 127) == 127, torch.nan, value)


def quantized_vectors(x: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """Values of q and scale for vectors along the last axis, float64."""
    x = x.detach().cpu().double()
    if x.shape[-1] == 0:
        return x, torch.full(x.shape[:-1], SCALE_MIN, dtype=torch.float64)
    amax = x.abs().amax(-1)
    if pow2:
        mantissa, exponent = torch.frexp(amax / 448)
        scale = torch.ldexp(torch.ones_like(amax), torch.where(mantissa == 0.5, exponent - 1, exponent))
        scale = torch.where(amax > 0, scale, 0.0)
    else:
        scale = (amax / 448).float().double()
    scale = torch.where(amax.isfinite(), scale.clamp_min(SCALE_MIN), torch.nan)
    return round_to_e4m3((x / scale[..., None]).float().double()), scale


def quantized_columns(x: Tensor, layout: Groups, pow2: bool) -> tuple[Tensor, Tensor]:
    """q ``(M, K)`` and scale ``(E, K)``, float64, zeros in rows of no group."""
    q = torch.zeros(x.shape, dtype=torch.float64)
    scale = torch.empty((len(layout.sizes), x.shape[1]), dtype=torch.float64)
    for e, rows in enumerate(layout.slices()):
        columns, scale[e] = quantized_vectors(x[rows].t(), pow2)
        q[rows] = columns.t()
    return q, scale


def unpadded(q: Tensor, layout: Groups) -> Tensor:
    """Rows of a layout whose groups start at multiples of 128, which is zero elsewhere, at their places in x."""
    out, rest, start = q.new_zeros((layout.num_rows, q.shape[1])), q.view(torch.uint8).clone(), 0
    for rows in layout.slices():
        size = rows.stop - rows.start
        out[rows] = q[start : start + size]
        rest[start : start + size] = 0
        start += (size + 127) // 128 * 128
    assert not rest.any()
    return out


def moved_to_columns(q: Tensor, scale: Tensor, x: Tensor, layout: Groups) -> tuple[Tensor, Tensor]:
    """Row-scaled q as column-scaled, for power-of-two scales; ``x`` is what the new scales are made for."""
    _, scale_col = quantized_columns(x, layout, True)
    q_col = torch.zeros_like(q)
    for e, rows in enumerate(layout.slices()):
        moved = round_to_e4m3(q[rows] * (scale[rows, None] / scale_col[e]))
        q_col[rows] = moved.clamp(-448, 448)
    return q_col, scale_col


def assert_quantized(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (q, scale), (q_values, scale_values) = actual, expected
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    torch.testing.assert_close(scale.cpu().double(), scale_values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(decoded(q), q_values, rtol=0, atol=0, equal_nan=True)


def assert_represents(x: Tensor, q: Tensor, scale: Tensor, axis: int) -> None:
    """What a scale is for: x within half a step of e4m3, zeros exact, not finite exactly where its vector is not."""
    x, dequantized = x.cpu().double(), decoded(q) * scale.cpu().double().unsqueeze(axis)
    visible = x.isfinite().all(axis, keepdim=True).expand_as(x)
    assert torch.equal(dequantized.isfinite(), visible)
    error = (dequantized - x).abs()
    # A scale that is not a power of two is itself rounded, as is the quotient.
    bound = x.abs() * (2.0**-4 + 2.0**-22) + scale.cpu().double().unsqueeze(axis) * (2.0**-10 * (1 + 2.0**-22))
    assert (error <= bound)[visible].all()
    assert not dequantized[(x == 0) & visible].any()


def assert_same_layout_on_meta(op, args: tuple, out: tuple[Tensor, ...]) -> None:
    meta = op(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))
    for m, o in zip(meta if isinstance(meta, tuple) else (meta,), out, strict=True):
        assert (m.shape, m.dtype) == (o.shape, o.dtype)
        # Strides of an empty tensor mean nothing.
        assert m.stride() == o.stride() or o.numel() == 0


def assert_same_bits(actual, expected) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (t.contiguous().view(torch.uint8) if t.element_size() == 1 else t for t in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


# ---- quantisation ----------------------------------------------------------------------------------------------------


@fuzz
@given(k=dims, layout=groups(), x=values(), pow2=st.booleans())
def test_rows(k, layout, x, pow2, device):
    x = x.build(layout.num_rows, k, device=device)
    q, scale = ops.quantize_rowwise(x, pow2)
    assert q.is_contiguous()
    assert_quantized((q, scale), quantized_vectors(x, pow2))
    assert_represents(x, q, scale, 1)
    assert_same_bits(ops.quantize_rowwise(x, pow2), (q, scale))
    assert_same_layout_on_meta(ops.quantize_rowwise, (x, pow2), (q, scale))


@fuzz
@given(k=dims, layout=groups(), x=values(), filler=fillers, pow2=st.booleans())
def test_columns_per_group(k, layout, x, filler, pow2, device):
    x, offs = x.build(layout.num_rows, k, device=device), end_offsets(list(layout.sizes), device)
    q, scale = ops.quantize_colwise_per_group(x, offs, pow2)
    assert_quantized((q, scale), quantized_columns(x, layout, pow2))
    for e, rows in enumerate(layout.slices()):
        assert_represents(x[rows], q[rows], scale[e], 0)
    assert not q[layout.total :].contiguous().view(torch.uint8).any()
    q_t, scale_t = ops.quantize_rowwise_per_group(x.t(), offs, pow2)
    assert_same_bits((q_t.t(), scale_t), (q, scale))
    padded_args = (offs, pow2, padded_offs(offs))
    padded = ops.quantize_colwise_per_group(x, *padded_args)
    assert_same_bits((unpadded(padded[0], layout)[: layout.total], padded[1]), (q[: layout.total], scale))
    assert_same_layout_on_meta(ops.quantize_colwise_per_group, (x, *padded_args), padded)
    assert_same_layout_on_meta(ops.quantize_colwise_per_group, (x, offs, pow2), (q, scale))
    assert_same_layout_on_meta(ops.quantize_rowwise_per_group, (x.t(), offs, pow2), (q_t, scale_t))
    other = x.clone()
    other[layout.total :] = filler
    assert_same_bits(ops.quantize_colwise_per_group(other, offs, pow2), (q, scale))
    assert_same_bits(ops.quantize_colwise_per_group(other, *padded_args), padded)


@fuzz
@given(k=dims, layout=groups(), x=values(), filler=fillers, pow2=st.booleans())
def test_rows_and_columns_of_one_tensor(k, layout, x, filler, pow2, device):
    x, offs = x.build(layout.num_rows, k, device=device), end_offsets(list(layout.sizes), device)
    args = (offs, padded_offs(offs), pow2)
    out = ops.quantize_rowwise_and_colwise_per_group(x, *args)
    q, scale = quantized_vectors(x, pow2)
    assert_quantized(out[:2], (q, scale))
    columns = moved_to_columns(q, scale, x, layout) if pow2 else quantized_columns(x, layout, pow2)
    assert_quantized((unpadded(out[2], layout), out[3]), columns)
    assert_same_layout_on_meta(ops.quantize_rowwise_and_colwise_per_group, (x, *args), out)
    other = x.clone()
    other[layout.total :] = filler
    assert_same_bits(ops.quantize_rowwise_and_colwise_per_group(other, *args)[2:], out[2:])


@fuzz
@given(k=dims, layout=groups(), x=values(), filler=fillers, pow2=st.booleans())
def test_from_rows_to_columns(k, layout, x, filler, pow2, device):
    x, offs = x.build(layout.num_rows, k, device=device), end_offsets(list(layout.sizes), device)
    q, scale = ops.quantize_rowwise(x, pow2)
    args = (offs, padded_offs(offs), pow2)
    out = ops.requantize_colwise_per_group(q, scale, *args)
    # A product in float32: at the very top of its range a value rounded up in e4m3 is infinite.
    dequantized = (decoded(q) * scale.cpu().double()[:, None]).float()
    if pow2:
        expected = moved_to_columns(decoded(q), scale.cpu().double(), dequantized, layout)
    else:
        expected = quantized_columns(dequantized, layout, pow2)
    assert_quantized((unpadded(out[0], layout), out[1]), expected)
    assert_same_layout_on_meta(ops.requantize_colwise_per_group, (q, scale, *args), out)
    q, scale = q.view(torch.uint8).clone(), scale.clone()
    q[layout.total :], scale[layout.total :] = 0x35, filler
    assert_same_bits(ops.requantize_colwise_per_group(q.view(torch.float8_e4m3fn), scale, *args), out)


@fuzz
@given(e=st.integers(0, 3), k=dims, n=dims, w1=values(), w3=values(), pow2=st.booleans())
def test_weights(e, k, n, w1, w3, pow2, device):
    w1 = w1.build(e, k, n, device=device)
    w3 = w3.build(e, k, n, device=device).to(w1.dtype)
    columns = ops.quantize_weight_colwise(w1, pow2)
    rows = ops.quantize_weight_rowwise(w1, pow2)
    q, scale = quantized_vectors(w1.transpose(1, 2), pow2)
    assert_quantized(columns, (q.transpose(1, 2), scale))
    q, scale = quantized_vectors(w1, pow2)
    assert_quantized(rows, (q.transpose(1, 2), scale))
    assert columns[0].transpose(1, 2).is_contiguous() and rows[0].transpose(1, 2).is_contiguous()
    assert_represents(w1, *columns, 1)
    assert_represents(w1.transpose(1, 2), *rows, 1)
    both = ops.quantize_weight(w1, pow2)
    assert_same_bits(both[:2], columns)
    if pow2:
        # The forward's form, of each expert the rows of one group, moved to the scales of the other axis.
        rows_of = zip(decoded(columns[0]).transpose(1, 2), columns[1].cpu().double(), w1.transpose(1, 2), strict=True)
        moved = [moved_to_columns(*expert, Groups((n,), 0))[0] for expert in rows_of]
        assert_quantized(both[2:], (torch.stack(moved) if moved else q.transpose(1, 2), scale))
    else:
        assert_same_bits(both[2:], rows)

    joint = torch.cat((w1, w3), 2)
    both = ops.quantize_weight(joint, pow2)
    assert_same_bits(ops.quantize_joint_weight(w1, w3, pow2), both)
    assert_same_bits(ops.quantize_joint_weight_colwise(w1, w3, pow2), both[:2])
    assert_same_layout_on_meta(ops.quantize_weight, (joint, pow2), both)
    assert_same_layout_on_meta(ops.quantize_joint_weight, (w1, w3, pow2), both)


def assert_represents_rows(q: Tensor, scale: Tensor, exact: Tensor, noise: Tensor) -> None:
    """Rows computed in float32, each value within ``noise`` of ``exact``, then quantised."""
    dequantized, scale = decoded(q) * scale.cpu().double()[:, None], scale.cpu().double()[:, None]
    not_finite = ~exact.isfinite().all(1)
    assert not dequantized[not_finite].isfinite().any()
    # Where float32 may overflow and float64 does not, both ends are right.
    sure = ((exact.abs() + noise).amax(1) < FLOAT32_MAX) & ~not_finite
    bound = exact.abs() * (2.0**-4 + 2.0**-20) + scale * 2.0**-10 * (1 + 2.0**-20) + 1.1 * noise
    assert ((dequantized - exact).abs() <= bound)[sure].all()
    # The scale is no larger than it must be.
    amax = (exact.abs() + noise).amax(1)
    assert (scale[:, 0] <= (amax * (2 / 448 * (1 + 2.0**-20))).clamp_min(SCALE_MIN))[sure].all()


@fuzz
@given(
    h=dims,
    layout=groups(),
    gate_up=values(layouts=("contiguous",)),
    grad=values(layouts=("contiguous",)),
    pow2=st.booleans(),
)
def test_swiglu(h, layout, gate_up, grad, pow2, device):
    m, offs = layout.num_rows, end_offsets(list(layout.sizes), device)
    gate_up, grad = gate_up.build(m, 2 * h, device=device), grad.build(m, h, device=device)
    q, scale = ops.swiglu_quantize_rowwise(gate_up, pow2)
    d_q, d_scale, h_q, h_scale = ops.swiglu_backward_quantize_rowwise(grad, gate_up, pow2)
    assert_same_bits((h_q, h_scale), (q, scale))
    assert_same_bits(ops.swiglu_quantize_rowwise(gate_up, pow2), (q, scale))
    assert_same_layout_on_meta(ops.swiglu_quantize_rowwise, (gate_up, pow2), (q, scale))
    assert_same_layout_on_meta(ops.swiglu_backward_quantize_rowwise, (grad, gate_up, pow2), (d_q, d_scale, q, scale))
    args = (grad, gate_up, offs, padded_offs(offs), pow2)
    both_ways = ops.swiglu_backward_quantize(*args)
    assert_same_layout_on_meta(ops.swiglu_backward_quantize, args, both_ways)
    assert_same_bits(both_ways[:2], (d_q, d_scale))
    if pow2:
        d_gate, d_up, h_exact = ops.swiglu_backward(grad, gate_up)
        exact = torch.cat((d_gate, d_up), 1), h_exact
        columns = [ops.quantize_rowwise_and_colwise_per_group(x, *args[2:])[2:] for x in exact]
    else:
        columns = [ops.requantize_colwise_per_group(*x, *args[2:]) for x in ((d_q, d_scale), (q, scale))]
    assert_same_bits(both_ways[2:], (*columns[0], *columns[1]))
    if m == 0:
        return
    gate, up = gate_up.cpu().double().chunk(2, 1)
    grad = grad.cpu().double()
    sigmoid = torch.sigmoid(gate)
    # Relative rounding, denormals, and the sigmoid that counts as zero below 2**-125.
    lost = 2.0**-20 * sigmoid + 2.0**-124
    silu, silu_noise = gate * sigmoid, gate.abs() * lost + 2.0**-149
    h_noise = up.abs() * silu_noise + 2.0**-149
    assert_represents_rows(q, scale, silu * up, h_noise.nan_to_num(posinf=torch.inf))
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    slope_noise = (1 + gate.abs()) * lost
    d_gate, d_up = grad * up * slope, grad * silu
    d_noise = torch.cat(
        ((grad * up).abs() * slope_noise + (1 + gate.abs()) * 2.0**-149, grad.abs() * silu_noise + 2.0**-149), 1
    )
    # The product of gradient and up may overflow in float32 where the gradient of the gate would not.
    d_noise[(grad * up).abs().amax(1) >= FLOAT32_MAX] = torch.inf
    assert_represents_rows(d_q, d_scale, torch.cat((d_gate, d_up), 1), d_noise)


# ---- grouped GEMMs ---------------------------------------------------------------------------------------------------


def assert_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """``actual`` is ``a @ b`` up to the rounding of sums in float32 and of the result; float64 operands.

    Where the operands give something that is not finite so does the product, and nowhere else unless it overflows.
    """
    exact, magnitude = a @ b, a.abs() @ b.abs()
    out, terms = actual.detach().cpu().double(), max(a.shape[1], 1)
    # A CPU adds in float32. Denormals have their own step.
    of_sums = magnitude * terms * 2.0**-23 + terms * 2.0**-149
    if actual.device.type == "cuda":
        # Hopper's tensor cores keep 14 bits. Each instruction, of 32 terms or fewer at a group's edges, cuts the sum so
        # far and what it adds off: on sums of squares by up to 1.7 * 2**-13 of the sum, on an H200. To its largest
        # product the 31 others are aligned, and cut off.
        instructions = -(-terms // 32) + 2
        largest = (a.abs()[:, :, None] * b.abs()).amax(1) if a.shape[1] else torch.zeros_like(exact)
        of_sums += instructions * 2.0**-12 * magnitude
        of_sums += min(terms, 32) * 2.0**-13 * largest.nan_to_num(posinf=torch.inf)
    of_result = exact.abs() * 2.0**-8 + 2.0**-133 if actual.dtype == torch.bfloat16 else exact.abs() * 2.0**-23
    assert not out[~exact.isfinite()].isfinite().any()
    assert not out[exact.abs() - of_sums > 2 * FLOAT32_MAX].isfinite().any()
    # The sum is multiplied by one scale after the other, the first of which may be too much for float32 alone.
    finite = magnitude < torch.finfo(actual.dtype).max * (1 - 2.0**-8)
    finite &= a.abs().sum(1, keepdim=True) * 448 < FLOAT32_MAX
    assert out[finite].isfinite().all()
    assert ((out - exact).abs() <= of_sums + of_result)[finite].all()


def assert_grouped_product(actual: Tensor, a: list[Tensor], b: list[Tensor], layout: Groups) -> None:
    """2d-3d if ``actual`` has two axes, else 2d-2d; operands by group."""
    for e, rows in enumerate(layout.slices()):
        assert_product(actual[rows] if actual.dim() == 2 else actual[e], a[e], b[e])
        if layout.sizes[e] == 0 and actual.dim() == 3:
            assert not actual[e].any()
    if actual.dim() == 2:
        assert not actual[layout.total :].any()


def rows_by_group(q: Tensor, scale: Tensor, layout: Groups) -> list[Tensor]:
    return [q[rows] * scale[rows, None] for rows in layout.slices()]


def columns_by_group(q: Tensor, scale: Tensor, layout: Groups) -> list[Tensor]:
    return [q[rows] * scale[e] for e, rows in enumerate(layout.slices())]


@fuzz
@given(
    k=dims,
    n=dims,
    layout=groups(),
    x=values(),
    grad=values(),
    w=values(),
    out_dtype=dtypes,
    filler=fillers,
    pow2=st.booleans(),
)
def test_scaled_grouped_mm(k, n, layout, x, grad, w, out_dtype, filler, pow2, device):
    sizes, offs = layout.sizes, end_offsets(list(layout.sizes), device)
    x, grad = x.build(layout.num_rows, k, device=device), grad.build(layout.num_rows, n, device=device)
    w = w.build(len(sizes), k, n, device=device)

    def product(a, b):
        return ops.scaled_grouped_mm(a[0], b[0], a[1], b[1], offs, out_dtype, fast_accum=False)

    a, b = ops.quantize_rowwise(x, pow2), ops.quantize_weight_colwise(w, pow2)
    out = product(a, b)
    assert out.dtype == out_dtype and out.shape == (layout.num_rows, n)
    weights = list(decoded(b[0]) * b[1].cpu().double()[:, None])
    assert_grouped_product(out, rows_by_group(decoded(a[0]), a[1].cpu().double(), layout), weights, layout)
    args = (a[0], b[0], a[1], b[1], offs, out_dtype)
    assert_same_layout_on_meta(ops.scaled_grouped_mm, args, (out,))
    assert_same_bits([product(a, b)], [out])
    # Rows of no group, of the operand and of its scales.
    scale = a[1].clone()
    scale[layout.total :] = filler
    assert_same_bits([product((a[0], scale), b)], [out])

    a, b = ops.quantize_rowwise_per_group(grad.t(), offs, pow2), ops.quantize_colwise_per_group(x, offs, pow2)
    out = product(a, b)
    assert out.dtype == out_dtype and out.shape == (len(sizes), n, k)
    grads = columns_by_group(decoded(a[0].t()), a[1].cpu().double(), layout)
    tokens = columns_by_group(decoded(b[0]), b[1].cpu().double(), layout)
    assert_grouped_product(out, [g.t() for g in grads], tokens, layout)
    # The padding between columns, and what a group's neighbours hold past the last group.
    q = a[0].clone(memory_format=torch.preserve_format)
    q.view(torch.uint8)[:, layout.total :] = 0x7F
    assert_same_bits([product((q, a[1]), b), product(a, b)], [out, out])


def grouped_mm_with_gradients(x, w_t, offs, grad, **options) -> tuple[Tensor, Tensor, Tensor]:
    x, w_t = x.detach().requires_grad_(), w_t.detach().requires_grad_()
    out = float8_grouped_mm(x, w_t, offs, **options)
    return out.detach(), *torch.autograd.grad(out, (x, w_t), grad)


@fuzz
@given(k=dims, n=dims, layout=groups(), x=values(), grad=values(), w=values(), recipe=recipes, pow2=st.booleans())
def test_float8_grouped_mm(k, n, layout, x, grad, w, recipe, pow2, device):
    offs = end_offsets(list(layout.sizes), device)
    x = x.build(layout.num_rows, k, device=device)
    grad = grad.build(layout.num_rows, n, device=device).to(x.dtype)
    w_t = w.build(len(layout.sizes), k, n, device=device)
    out, grad_x, grad_w = grouped_mm_with_gradients(
        x, w_t, offs, grad, recipe=recipe, round_scales_to_power_of_2=pow2, fast_accum="none"
    )
    assert [t.dtype for t in (out, grad_x, grad_w)] == [x.dtype, x.dtype, w_t.dtype]
    assert [t.shape for t in (out, grad_x, grad_w)] == [grad.shape, x.shape, w_t.shape]

    q, scale = quantized_vectors(w_t.transpose(1, 2), pow2)
    w_forward = (q * scale[..., None]).transpose(1, 2)
    assert_grouped_product(out, rows_by_group(*quantized_vectors(x, pow2), layout), list(w_forward), layout)
    q, scale = quantized_vectors(w_t, pow2)
    w_dgrad = (q * scale[..., None]).transpose(1, 2)
    assert_grouped_product(grad_x, rows_by_group(*quantized_vectors(grad, pow2), layout), list(w_dgrad), layout)
    if recipe == "rowwise":
        a = columns_by_group(*quantized_columns(grad, layout, pow2), layout)
        b = columns_by_group(*quantized_columns(x, layout, pow2), layout)
    else:
        a, b = ([t.cpu()[rows].bfloat16().double() for rows in layout.slices()] for t in (grad, x))
    # torch's bf16 product rounds to bf16 whatever is asked for.
    rounded = grad_w if recipe == "rowwise" or grad_w.device.type == "cpu" else grad_w.bfloat16()
    assert_grouped_product(rounded.transpose(1, 2), [g.t() for g in a], b, layout)


# ---- what must not change a result -----------------------------------------------------------------------------------


def experts_with_gradients(x, w1, w2, w3, offs, grad, function=float8_experts, **options) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, w1, w2, w3)]
    out = function(*leaves, offs, **options)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def differentiable(function: str, k: int, h: int, layout: Groups, weights: list[Values], device, **options):
    """``run(x, grad)`` to (result and gradient of x, weight gradients), and the weights."""
    e, offs = len(layout.sizes), end_offsets(list(layout.sizes), device)
    if function == "experts":
        shapes = ((e, h, k), (e, k, h), (e, h, k))
        w = [v.build(*shape, device=device) for v, shape in zip(weights, shapes, strict=True)]
        w[2] = w[2].to(w[0].dtype)

        def run(x, grad):
            out = experts_with_gradients(x, *w, offs, grad, **options)
            return out[:2], out[2:]

    else:
        w = [weights[0].build(e, k, k, device=device)]

        def run(x, grad):
            out = grouped_mm_with_gradients(x, *w, offs, grad, **options)
            return out[:2], out[2:]

    return run, w


FUNCTIONS = pytest.mark.parametrize("function", ["grouped_mm", "experts"])


@FUNCTIONS
@fuzz
@given(
    k=dims,
    h=dims,
    layout=groups(),
    x=values(),
    grad=values(),
    weights=st.lists(values(), min_size=3, max_size=3),
    filler=fillers,
    recipe=recipes,
    pow2=st.booleans(),
)
def test_rows_of_no_group_strides_and_repetition_change_nothing(
    function, k, h, layout, x, grad, weights, filler, recipe, pow2, device
):
    options = {"recipe": recipe, "round_scales_to_power_of_2": pow2}
    run, w = differentiable(function, k, h, layout, weights, device, **options)
    x = x.build(layout.num_rows, k, device=device)
    grad = grad.build(layout.num_rows, k, device=device).to(x.dtype)
    rows, grad_w = run(x, grad)
    assert [t.dtype for t in (*rows, *grad_w)] == [x.dtype, x.dtype, *(t.dtype for t in w)]
    for t in rows:
        assert not t[layout.total :].any()
    for t in grad_w:
        assert not t[[e for e, size in enumerate(layout.sizes) if size == 0]].any()
    other_x, other_grad = x.clone(), grad.clone()
    other_x[layout.total :], other_grad[layout.total :] = filler, filler
    other_rows, other_grad_w = run(other_x.contiguous(), other_grad.contiguous())
    assert_same_bits((*other_rows, *other_grad_w), (*rows, *grad_w))


@FUNCTIONS
@fuzz
@given(
    k=dims,
    h=dims,
    layout=groups().filter(lambda layout: layout.total > 0),
    x=values(layouts=INPUT_LAYOUTS[:-1]),
    grad=values(layouts=INPUT_LAYOUTS[:-1]),
    weights=st.lists(values(), min_size=3, max_size=3),
    position=st.floats(0, 1, exclude_max=True, width=16),
    filler=fillers,
    recipe=recipes,
    pow2=st.booleans(),
)
def test_a_token_changes_its_own_row_and_its_groups_weight_gradients_alone(
    function, k, h, layout, x, grad, weights, position, filler, recipe, pow2, device
):
    options = {"recipe": recipe, "round_scales_to_power_of_2": pow2}
    run, _ = differentiable(function, k, h, layout, weights, device, **options)
    x = x.build(layout.num_rows, k, device=device)
    grad = grad.build(layout.num_rows, k, device=device).to(x.dtype)
    rows, grad_w = run(x, grad)
    row = int(position * layout.total)
    group = next(e for e, group in enumerate(layout.slices()) if row < group.stop)
    other_x = x.clone()
    other_x[row, int(position * k)] = filler
    other_rows, other_grad_w = run(other_x, grad)
    others = torch.arange(layout.num_rows, device=device) != row
    assert_same_bits([t[others] for t in other_rows], [t[others] for t in rows])
    elsewhere = torch.arange(len(layout.sizes), device=device) != group
    assert_same_bits([t[elsewhere] for t in other_grad_w], [t[elsewhere] for t in grad_w])
    if not torch.tensor(filler).isfinite():
        assert not other_rows[0][row].isfinite().any()
        if function == "experts":
            assert not other_rows[1][row].isfinite().any()
        assert not any(t[group].isfinite().all() for t in other_grad_w[:1])


@FUNCTIONS
@fuzz
@given(
    k=dims,
    h=dims,
    layout=groups().filter(lambda layout: layout.total > 0),
    x=ordinary,
    grad=ordinary,
    weights=st.lists(ordinary, min_size=3, max_size=3),
    position=st.floats(0, 1, exclude_max=True, width=16),
    bad=st.sampled_from([torch.nan, torch.inf]),
)
def test_a_bad_expert_spoils_its_own_tokens_alone(function, k, h, layout, x, grad, weights, position, bad, device):
    run, w = differentiable(function, k, h, layout, weights, device)
    x, grad = x.build(layout.num_rows, k, device=device), grad.build(layout.num_rows, k, device=device)
    grad = grad.to(x.dtype)
    rows, grad_w = run(x, grad)
    expert = int(position * len(layout.sizes))
    for t in w:
        t[expert, 0, 0] = bad
    bad_rows, bad_grad_w = run(x, grad)
    spoilt = torch.zeros(layout.num_rows, dtype=torch.bool, device=device)
    spoilt[layout.slices()[expert]] = True
    assert_same_bits([t[~spoilt] for t in bad_rows], [t[~spoilt] for t in rows])
    assert not any(t[spoilt].isfinite().all(1).any() for t in bad_rows)
    elsewhere = torch.arange(len(layout.sizes), device=device) != expert
    assert_same_bits([t[elsewhere] for t in bad_grad_w], [t[elsewhere] for t in grad_w])
    if layout.sizes[expert] == 0:
        assert not any(t[expert].any() for t in bad_grad_w)


@FUNCTIONS
@fuzz
@given(
    k=dims,
    h=dims,
    layout=groups(),
    x=values(finite=True),
    grad=values(finite=True),
    weights=st.lists(ordinary, min_size=3, max_size=3),
    zero=st.sampled_from(["x", "grad"]),
    pow2=st.booleans(),
)
def test_zeros_stay_zeros(function, k, h, layout, x, grad, weights, zero, pow2, device):
    run, _ = differentiable(function, k, h, layout, weights, device, round_scales_to_power_of_2=pow2)
    x = x.build(layout.num_rows, k, device=device).clone()
    grad = grad.build(layout.num_rows, k, device=device).to(x.dtype, copy=True)
    # SwiGLU multiplies two values of x's size, and what leaves float32's range is not zero times anything.
    in_range = function == "grouped_mm" or x.numel() == 0 or x.abs().amax() < 1e15
    for rows in (slice(1, None, 2), slice(None)):
        {"x": x, "grad": grad}[zero][rows] = 0
        (out, grad_x), grad_w = run(x, grad)
        if zero == "x":
            assert not out[rows].any()
        elif in_range:
            assert not grad_x[rows].any()
    if in_range and (function == "grouped_mm" or zero == "grad"):
        assert not any(t.any() for t in grad_w)


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_by_definition(x, w1, w2, w3, layout, grad, recipe, pow2) -> tuple[Tensor, ...]:
    """The chain of products on e4m3 values in float64, rounding where the package is documented to round."""

    def rows(t):
        q, scale = quantized_vectors(t, pow2)
        return q * scale[..., None]

    def columns(t, from_rows):
        # Of one group: from its row-scaled form, or with the scales of the values themselves.
        one = Groups((t.shape[0],), 0)
        if pow2:
            amax_of = rows(t).float() if from_rows else t
            q, scale = moved_to_columns(*quantized_vectors(t, pow2), amax_of, one)
        else:
            q, scale = quantized_columns(rows(t).float() if from_rows else t, one, pow2)
        return q * scale

    x, w1, w2, w3, grad = (t.detach().cpu() for t in (x, w1, w2, w3, grad))
    out, grad_x = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    grads = [torch.zeros(w.shape, dtype=torch.float64) for w in (w1, w2, w3)]
    for e, group in enumerate(layout.slices()):
        xe, ge, w13 = x[group], grad[group], torch.cat((w1[e], w3[e]))
        gate, up = (rows(xe) @ rows(w13).t()).bfloat16().double().chunk(2, 1)
        sigmoid = torch.sigmoid(gate)
        h = gate * sigmoid * up
        out[group] = rows(h.float()) @ rows(w2[e]).t()
        grad_h = (rows(ge) @ rows(w2[e].t()).t()).bfloat16().double()
        d = torch.cat((grad_h * up * sigmoid * (1 + gate * (1 - sigmoid)), grad_h * gate * sigmoid), 1).float()
        grad_x[group] = rows(d) @ rows(w13.t()).t()
        if layout.sizes[e] == 0:
            continue
        if recipe == "rowwise":
            hc, dc, xc, gc = columns(h.float(), True), columns(d, True), columns(xe.float(), True), columns(ge, False)
        else:
            hc, dc, xc, gc = (t.bfloat16().double() for t in (h, d, xe, ge))
        d_gate, d_up = dc.chunk(2, 1)
        grads[0][e], grads[1][e], grads[2][e] = d_gate.t() @ xc, gc.t() @ hc, d_up.t() @ xc
    return out, grad_x, *grads


@fuzz
@given(
    k=dims,
    h=dims,
    layout=groups().filter(lambda layout: layout.total > 0),
    x=ordinary,
    grad=ordinary,
    weights=st.lists(ordinary, min_size=3, max_size=3),
    recipe=recipes,
    pow2=st.booleans(),
    keep=st.booleans(),
)
def test_float8_experts(k, h, layout, x, grad, weights, recipe, pow2, keep, device):
    offs, e = end_offsets(list(layout.sizes), device), len(layout.sizes)
    x, grad = x.build(layout.num_rows, k, device=device), grad.build(layout.num_rows, k, device=device)
    shapes = ((e, h, k), (e, k, h), (e, h, k))
    w = [v.build(*s, device=device) * s[2] ** -0.5 for v, s in zip(weights, shapes, strict=True)]
    w[2], grad = w[2].to(w[0].dtype), grad.to(x.dtype)
    options = {"recipe": recipe, "round_scales_to_power_of_2": pow2}
    actual = experts_with_gradients(x, *w, offs, grad, **options, fast_accum="none", keep_quantized_weights=keep)
    expected = experts_by_definition(x, *w, layout, grad, recipe, pow2)
    for name, a, b in zip(("out", "grad_x", "grad_w1", "grad_w2", "grad_w3"), actual, expected, strict=True):
        assert a.shape == b.shape and a.isfinite().all(), name
        if not b.any():
            assert not a.any(), name
            continue
        # A sum rounded to the other of two neighbours in bf16 may be rounded to other neighbours in e4m3.
        assert sqnr_db(a.cpu(), b) >= 28, f"{name}: {sqnr_db(a.cpu(), b):.1f} dB"


# For any sizes; only those of 0 and 1 are compiled for, and dtypes.
compiled_experts = torch.compile(float8_experts, backend="aot_eager", fullgraph=True, dynamic=True)


@fuzz
@given(
    layout=groups(),
    x=values(layouts=("contiguous", "transposed")),
    grad=values(),
    weights=st.lists(values(layouts=("contiguous",)), min_size=3, max_size=3),
)
def test_compiled_experts_have_the_bits_of_eager_ones(layout, x, grad, weights, device):
    k, h, e = 48, 80, len(layout.sizes)
    offs = end_offsets(list(layout.sizes), device)
    x, grad = x.build(layout.num_rows, k, device=device), grad.build(layout.num_rows, k, device=device)
    w = [v.build(*s, device=device) for v, s in zip(weights, ((e, h, k), (e, k, h), (e, h, k)), strict=True)]
    w[1], w[2], grad = w[1].to(w[0].dtype), w[2].to(w[0].dtype), grad.to(x.dtype)
    eager = experts_with_gradients(x, *w, offs, grad)
    with torch._dynamo.config.patch(recompile_limit=100):
        assert_same_bits(experts_with_gradients(x, *w, offs, grad, function=compiled_experts), eager)
