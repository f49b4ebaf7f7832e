"""Pure-torch twin of every op: the semantics of record, on any device.

Names as everywhere in this package: ``rowwise`` and ``colwise`` say which axis shares one scale, ``per_group`` that
each token group has its own. ``offs`` are int32 end offsets of the token groups; rows at or past ``offs[-1]`` belong
to no group. A scale multiplies: ``x ≈ q.float() * scale``.
"""

import torch

from titan_fp8moe.float8 import FP8_DTYPE, FP8_MAX, GROUP_TILE, leading_dim, padded_tokens, scale_from_amax

FLOAT32_MAX = torch.finfo(torch.float32).max


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    # Each NaN is replaced by the canonical one: its sign would otherwise depend on the device.
    return torch.where(scale.isnan(), torch.nan, x.float() / scale).to(FP8_DTYPE)


def _bits_of_magnitude(x: torch.Tensor) -> torch.Tensor:
    # As integers magnitudes keep their order, and NaN is above infinity: a maximum that cannot lose a NaN.
    return x.float().abs().contiguous().view(torch.int32)


def _amax(x: torch.Tensor, dim: int) -> torch.Tensor:
    return _bits_of_magnitude(x).amax(dim).view(torch.float32)


def group_of_row(offs: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The group that each of ``num_rows`` rows belongs to, int64 ``(M,)``; E for rows at or past ``offs[-1]``."""
    return torch.searchsorted(offs, torch.arange(num_rows, device=offs.device, dtype=offs.dtype), right=True)


def column_major(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x (M, K)`` in column-major order with `leading_dim` of M between columns."""
    m, k = x.shape
    out = x.new_empty((k, leading_dim(m)))[:, :m].t()
    return out.copy_(x)


def _colwise_per_group_amax(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    group = group_of_row(offs, x.shape[0])
    bits = torch.zeros((offs.shape[0] + 1, x.shape[1]), dtype=torch.int32, device=x.device)
    bits.scatter_reduce_(0, group[:, None].expand(x.shape), _bits_of_magnitude(x), "amax")
    return bits[:-1].view(torch.float32)


def _scale_of_row(scale: torch.Tensor, offs: torch.Tensor, num_rows: int) -> torch.Tensor:
    # An infinite scale for rows of no group: finite values become zeros there.
    no_group = scale.new_full((1, scale.shape[1]), torch.inf)
    return torch.cat((scale, no_group))[group_of_row(offs, num_rows)]


def _zero_past_last_group(q: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    in_group = group_of_row(offs, q.shape[0]) < offs.shape[0]
    return torch.where(in_group[:, None], q.view(torch.uint8), 0).view(q.dtype)


def quantize_rowwise(x: torch.Tensor, round_scales_to_power_of_2: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_from_amax(_amax(x, 1), round_scales_to_power_of_2)
    return _divide(x, scale[:, None]).contiguous(), scale


def quantize_colwise_per_group(
    x: torch.Tensor,
    offs: torch.Tensor,
    round_scales_to_power_of_2: bool = True,
    padded_offs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_from_amax(_colwise_per_group_amax(x, offs), round_scales_to_power_of_2)
    q = _divide(x, _scale_of_row(scale, offs, x.shape[0]))
    if padded_offs is not None:
        return _pad_groups(q, offs, padded_offs), scale
    return column_major(_zero_past_last_group(q, offs)), scale


def quantize_rowwise_per_group(
    x_t: torch.Tensor, offs: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    q, scale = quantize_colwise_per_group(x_t.t(), offs, round_scales_to_power_of_2)
    return q.t(), scale


def _rescale(q: torch.Tensor, scale: torch.Tensor, new_scale: torch.Tensor) -> torch.Tensor:
    # Where the ratio of two scales passes 2**30, q is zero (its column's amax is at least its own magnitude): the
    # bound only keeps 0 * inf away.
    ratio = (scale / new_scale).clamp_max(2.0**30)
    # What was rounded up below the normal range of its row may pass 448 under its column's scale.
    rescaled = (q.float() * ratio).clamp(-FP8_MAX, FP8_MAX)
    return torch.where(ratio.isnan(), torch.nan, rescaled).to(FP8_DTYPE)


def padded_offs(offs: torch.Tensor) -> torch.Tensor:
    sizes = torch.diff(offs, prepend=offs.new_zeros(1)).clamp_min(0)
    return ((sizes + (GROUP_TILE - 1)) // GROUP_TILE * GROUP_TILE).cumsum(0, dtype=torch.int32)


def _pad_groups(q: torch.Tensor, offs: torch.Tensor, padded_offs: torch.Tensor) -> torch.Tensor:
    """Rows of ``q (M, K)``, each group from its start in ``padded_offs`` on, column-major and zero elsewhere."""
    m, k = q.shape
    num_groups = offs.shape[0]
    out = q.new_zeros((k, padded_tokens(m, num_groups) + 1), dtype=torch.uint8).t()
    shift = torch.cat((offs.new_zeros(1), (padded_offs - offs)[:-1]))[:num_groups]
    group = group_of_row(offs, m)
    # Rows of no group to one row more, which is cut off.
    target = torch.arange(m, device=q.device) + torch.cat((shift, shift.new_zeros(1)))[group]
    target = torch.where(group < num_groups, target, out.shape[0] - 1)
    out[target] = q.view(torch.uint8)
    return out.view(q.dtype)[:-1].t().contiguous().t()


def requantize_colwise_per_group(
    q: torch.Tensor,
    scale: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    round_scales_to_power_of_2: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    # What was rounded up to 2**128 is the largest number: a finite input never becomes infinite.
    dequantized = (q.float() * scale[:, None]).clamp(-FLOAT32_MAX, FLOAT32_MAX)
    scale_col = scale_from_amax(_colwise_per_group_amax(dequantized, offs), round_scales_to_power_of_2)
    scale_of_row = _scale_of_row(scale_col, offs, q.shape[0])
    if round_scales_to_power_of_2:
        q_col = _rescale(q, scale[:, None], scale_of_row)
    else:
        q_col = _divide(dequantized, scale_of_row)
    return _pad_groups(q_col, offs, padded_offs), scale_col


def quantize_rowwise_and_colwise_per_group(
    x: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    round_scales_to_power_of_2: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, scale = quantize_rowwise(x, round_scales_to_power_of_2)
    scale_col = scale_from_amax(_colwise_per_group_amax(x, offs), round_scales_to_power_of_2)
    scale_of_row = _scale_of_row(scale_col, offs, x.shape[0])
    q_col = _rescale(q, scale[:, None], scale_of_row) if round_scales_to_power_of_2 else _divide(x, scale_of_row)
    return q, scale, _pad_groups(q_col, offs, padded_offs), scale_col


def quantize_weight_colwise(
    w_t: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_from_amax(_amax(w_t, 1), round_scales_to_power_of_2)
    return _divide(w_t, scale[:, None, :]).transpose(1, 2).contiguous().transpose(1, 2), scale


def quantize_weight_rowwise(
    w_t: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = scale_from_amax(_amax(w_t, 2), round_scales_to_power_of_2)
    return _divide(w_t, scale[:, :, None]).contiguous().transpose(1, 2), scale


def quantize_weight(
    w_t: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, scale = quantize_weight_colwise(w_t, round_scales_to_power_of_2)
    q_row, scale_row = quantize_weight_rowwise(w_t, round_scales_to_power_of_2)
    if round_scales_to_power_of_2:
        q_row = _rescale(q, scale[:, None, :], scale_row[:, :, None]).contiguous().transpose(1, 2)
    return q, scale, q_row, scale_row


def _groups(offs: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    ends = offs.tolist()
    starts = [0, *ends][:-1]
    if any(end < start for start, end in zip(starts, ends, strict=True)) or (ends and ends[-1] > num_rows):
        raise ValueError(
            f"offs must be non-decreasing end offsets with offs[-1] <= M = {num_rows}, got {ends}; "
            "pass the cumulative sum of the group sizes"
        )
    return list(zip(starts, ends, strict=True))


def grouped_mm(a: torch.Tensor, b_t: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`scaled_grouped_mm` without scales, accumulated in float32. Reads ``offs`` on the host."""
    # Autocast would hand the products below to bf16.
    with torch.autocast(a.device.type, enabled=False):
        if b_t.dim() == 3:
            out = a.new_zeros((a.shape[0], b_t.shape[2]), dtype=out_dtype)
            for e, (start, end) in enumerate(_groups(offs, a.shape[0])):
                out[start:end] = a[start:end].float() @ b_t[e].float()
        else:
            out = a.new_zeros((offs.shape[0], a.shape[0], b_t.shape[1]), dtype=out_dtype)
            for e, (start, end) in enumerate(_groups(offs, a.shape[1])):
                out[e] = a[:, start:end].float() @ b_t[start:end].float()
    return out


def scaled_grouped_mm(
    a: torch.Tensor,
    b_t: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    acc = grouped_mm(a, b_t, offs, torch.float32)
    # Two multiplications, never one by the product of the scales, which may underflow.
    if b_t.dim() == 3:
        group = group_of_row(offs, a.shape[0])
        in_group = group < offs.shape[0]
        scale_b = torch.cat((scale_b, scale_b.new_zeros((1, scale_b.shape[1]))))[group]
        out = torch.where(in_group[:, None], acc * scale_a[:, None] * scale_b, 0.0)
    else:
        out = acc * scale_a[:, :, None] * scale_b[:, None, :]
    return out.to(out_dtype)


def _swiglu_parts(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    gate, up = gate_up.float().chunk(2, 1)
    # Near the smallest normal number the sigmoid counts as zero: the kernels then need no general division.
    reciprocal = 1 + torch.exp(-gate)
    sigmoid = torch.where(reciprocal < 2.0**125, 1 / reciprocal, 0.0)
    return gate, up, sigmoid, gate * sigmoid


def swiglu_backward(grad_h: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Float32 gradients of gate and up, and h: ``silu'(g) = σ(g) (1 + g (1 - σ(g)))``."""
    gate, up, sigmoid, silu = _swiglu_parts(gate_up)
    grad_h = grad_h.float()
    return (grad_h * up) * (sigmoid * (1 + gate * (1 - sigmoid))), grad_h * silu, silu * up


def swiglu_quantize_rowwise(
    gate_up: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    _, up, _, silu = _swiglu_parts(gate_up)
    return quantize_rowwise(silu * up, round_scales_to_power_of_2)


def swiglu_backward_quantize_rowwise(
    grad_h: torch.Tensor, gate_up: torch.Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    d_gate, d_up, h = swiglu_backward(grad_h, gate_up)
    return (
        *quantize_rowwise(torch.cat((d_gate, d_up), 1), round_scales_to_power_of_2),
        *quantize_rowwise(h, round_scales_to_power_of_2),
    )


def swiglu_backward_quantize(
    grad_h: torch.Tensor,
    gate_up: torch.Tensor,
    offs: torch.Tensor,
    padded_offs: torch.Tensor,
    round_scales_to_power_of_2: bool = True,
) -> tuple[torch.Tensor, ...]:
    if not round_scales_to_power_of_2:
        q, scale, q_h, scale_h = swiglu_backward_quantize_rowwise(grad_h, gate_up, False)
        cols = requantize_colwise_per_group(q, scale, offs, padded_offs, False)
        return q, scale, *cols, *requantize_colwise_per_group(q_h, scale_h, offs, padded_offs, False)
    d_gate, d_up, h = swiglu_backward(grad_h, gate_up)
    both = quantize_rowwise_and_colwise_per_group(torch.cat((d_gate, d_up), 1), offs, padded_offs)
    return *both, *quantize_rowwise_and_colwise_per_group(h, offs, padded_offs)[2:]
