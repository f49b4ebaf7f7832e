"""The operators as ``torch.library`` custom ops: each checks, allocates and launches; each has a fake twin.

``torch.ops.titan_fp8moe.*`` trace through ``torch.compile(fullgraph=True)``, run on meta and fake tensors and have no
autograd of their own: `float8_grouped_mm` and `float8_experts` are the differentiable calls.

Shapes: M tokens, K in, N out, E experts. ``offs`` is int32 ``(E,)`` on the device of the data: non-decreasing end
offsets of the token groups, ``offs[-1] <= M``; it is not read on the host outside the reference path. Rows at or past
``offs[-1]`` belong to no group. A scale is float32 and multiplies: ``x ≈ q.float() * scale``.
"""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import ALIGNMENT, FP8_DTYPE, leading_dim, round_up

GEMM_BACKENDS = ("auto", "torch", "reference")
_INPUT_DTYPES = (torch.bfloat16, torch.float32)


def _check_input(name: str, x: Tensor, dim: int) -> None:
    if x.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(x.shape)}")
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(f"{name} must be bfloat16 or float32, got {x.dtype}; cast it first")


def _check_fp8(name: str, q: Tensor, dim: int) -> None:
    if q.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got shape {tuple(q.shape)}")
    if q.dtype != FP8_DTYPE:
        raise TypeError(f"{name} must be {FP8_DTYPE}, got {q.dtype}; quantise it first")


def _check_offs(offs: Tensor, data: Tensor) -> None:
    if offs.dtype != torch.int32 or offs.dim() != 1:
        raise TypeError(
            f"offs must be int32 with shape (E,), got {offs.dtype} with shape {tuple(offs.shape)}; "
            "use torch.cumsum(group_sizes, 0, dtype=torch.int32)"
        )
    if offs.device != data.device:
        raise ValueError(
            f"offs must be on the device of the data, {data.device}, got {offs.device}; move it with offs.to(...)"
        )


def _check_multiple_of_16(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % ALIGNMENT != 0:
            raise ValueError(f"{name} must be divisible by {ALIGNMENT} for FP8 GEMMs, got {size}; pad the dimension")


def _empty_column_major(x: Tensor, m: int, k: int) -> Tensor:
    return x.new_empty((k, leading_dim(m)), dtype=FP8_DTYPE)[:, :m].t()


def _empty_scale(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


# ---- quantisation ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("titan_fp8moe::quantize_rowwise", mutates_args=())
def quantize_rowwise(x: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """One scale per row.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, K)`` e4m3 row-major and scale ``(M,)``.
    """
    _check_input("x", x, 2)
    return reference.quantize_rowwise(x, round_scales_to_power_of_2)


@quantize_rowwise.register_fake
def _(x: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_input("x", x, 2)
    return x.new_empty(x.shape, dtype=FP8_DTYPE), _empty_scale(x, x.shape[0])


@torch.library.custom_op("titan_fp8moe::quantize_colwise_per_group", mutates_args=())
def quantize_colwise_per_group(
    x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """One scale per column and token group: an operand whose rows are the contraction of a weight gradient.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides; groups are ranges of rows.
        offs: ``(E,)``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(M, K)`` e4m3 column-major (see `leading_dim`), zeros past ``offs[-1]``, and scale
        ``(E, K)``.
    """
    _check_input("x", x, 2)
    _check_offs(offs, x)
    return reference.quantize_colwise_per_group(x, offs, round_scales_to_power_of_2)


@quantize_colwise_per_group.register_fake
def _(x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_input("x", x, 2)
    _check_offs(offs, x)
    m, k = x.shape
    return _empty_column_major(x, m, k), _empty_scale(x, offs.shape[0], k)


@torch.library.custom_op("titan_fp8moe::quantize_rowwise_per_group", mutates_args=())
def quantize_rowwise_per_group(
    x_t: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """One scale per row and token group, groups along columns: `quantize_colwise_per_group` of the transpose.

    Args:
        x_t: ``(N, M)`` bf16 or fp32, any strides; groups are ranges of columns.
        offs: ``(E,)``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(N, M)`` e4m3 row-major (rows `leading_dim` apart), zeros past ``offs[-1]``, and scale ``(E, N)``.
    """
    _check_input("x_t", x_t, 2)
    _check_offs(offs, x_t)
    return reference.quantize_rowwise_per_group(x_t, offs, round_scales_to_power_of_2)


@quantize_rowwise_per_group.register_fake
def _(x_t: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_input("x_t", x_t, 2)
    _check_offs(offs, x_t)
    n, m = x_t.shape
    return _empty_column_major(x_t, m, n).t(), _empty_scale(x_t, offs.shape[0], n)


@torch.library.custom_op("titan_fp8moe::quantize_rowwise_and_colwise_per_group", mutates_args=())
def quantize_rowwise_and_colwise_per_group(
    x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both forms of one tensor, as an output gradient needs them: rowwise for dgrad, colwise per group for wgrad.

    With power-of-two scales the second form is the first one moved by the ratio of the two scales: exact except for
    values that underflow in the row's scale.

    Args:
        x: ``(M, K)`` bf16 or fp32, any strides; groups are ranges of rows.
        offs: ``(E,)``.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q and scale of `quantize_rowwise`, then q and scale in the layout of `quantize_colwise_per_group`.
    """
    _check_input("x", x, 2)
    _check_offs(offs, x)
    return reference.quantize_rowwise_and_colwise_per_group(x, offs, round_scales_to_power_of_2)


@quantize_rowwise_and_colwise_per_group.register_fake
def _(x: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_input("x", x, 2)
    _check_offs(offs, x)
    m, k = x.shape
    return (
        x.new_empty((m, k), dtype=FP8_DTYPE),
        _empty_scale(x, m),
        _empty_column_major(x, m, k),
        _empty_scale(x, offs.shape[0], k),
    )


def _check_requantize(q: Tensor, scale: Tensor, offs: Tensor) -> None:
    _check_fp8("q", q, 2)
    _check_offs(offs, q)
    _check_scale("scale", scale, (q.shape[0],), q)


@torch.library.custom_op("titan_fp8moe::requantize_colwise_per_group", mutates_args=())
def requantize_colwise_per_group(
    q: Tensor, scale: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True
) -> tuple[Tensor, Tensor]:
    """A row-scaled FP8 tensor as a column-scaled one, so that no bf16 original has to be kept for a weight gradient.

    With power-of-two scales values move by an exponent shift, exact except where they underflow; otherwise they are
    dequantised and quantised again, which rounds twice.

    Args:
        q: ``(M, K)`` e4m3 row-major.
        scale: ``(M,)``.
        offs: ``(E,)``.
        round_scales_to_power_of_2: of the new scales; pass what ``scale`` was made with.

    Returns:
        q and scale in the layout of `quantize_colwise_per_group`.
    """
    _check_requantize(q, scale, offs)
    return reference.requantize_colwise_per_group(q, scale, offs, round_scales_to_power_of_2)


@requantize_colwise_per_group.register_fake
def _(q: Tensor, scale: Tensor, offs: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_requantize(q, scale, offs)
    m, k = q.shape
    return _empty_column_major(q, m, k), _empty_scale(q, offs.shape[0], k)


@torch.library.custom_op("titan_fp8moe::quantize_weight_colwise", mutates_args=())
def quantize_weight_colwise(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """Expert weights for the forward: one scale per expert and column, amax over the contraction K.

    Args:
        w_t: ``(E, K, N)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(E, K, N)`` e4m3, K contiguous, and scale ``(E, N)``.
    """
    _check_input("w_t", w_t, 3)
    return reference.quantize_weight_colwise(w_t, round_scales_to_power_of_2)


@quantize_weight_colwise.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_input("w_t", w_t, 3)
    e, k, n = w_t.shape
    return w_t.new_empty((e, n, k), dtype=FP8_DTYPE).transpose(1, 2), _empty_scale(w_t, e, n)


@torch.library.custom_op("titan_fp8moe::quantize_weight_rowwise", mutates_args=())
def quantize_weight_rowwise(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    """Expert weights for dgrad: one scale per expert and row, amax over N, transposed for a contraction over N.

    Args:
        w_t: ``(E, K, N)`` bf16 or fp32, any strides.
        round_scales_to_power_of_2: see `scale_from_amax`.

    Returns:
        q ``(E, N, K)`` e4m3, N contiguous, and scale ``(E, K)``.
    """
    _check_input("w_t", w_t, 3)
    return reference.quantize_weight_rowwise(w_t, round_scales_to_power_of_2)


@quantize_weight_rowwise.register_fake
def _(w_t: Tensor, round_scales_to_power_of_2: bool = True) -> tuple[Tensor, Tensor]:
    _check_input("w_t", w_t, 3)
    e, k, n = w_t.shape
    return w_t.new_empty((e, k, n), dtype=FP8_DTYPE).transpose(1, 2), _empty_scale(w_t, e, k)


# ---- grouped GEMM ----------------------------------------------------------------------------------------------------


def resolve_gemm_backend(backend: str, device: torch.device) -> str:
    """The backend that runs: ``"torch"`` or ``"reference"``.

    Raises:
        ValueError: an unknown name.
        RuntimeError: the device has no FP8 grouped GEMM and the reference was not asked for.
    """
    if backend not in GEMM_BACKENDS:
        raise ValueError(f"gemm_backend must be one of {GEMM_BACKENDS}, got {backend!r}")
    if backend == "reference" or device.type != "cuda":
        return "reference"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != (9, 0):
        raise RuntimeError(
            f"torch's FP8 grouped GEMM needs compute capability 9.0 (Hopper), {device} has {major}.{minor}; "
            'use gemm_backend="reference" (slow), or emulate = true in [fp8moe]'
        )
    return "torch"


def _check_scale(name: str, scale: Tensor, shape: tuple[int, ...], data: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scale.dtype}")
    if tuple(scale.shape) != shape or not scale.is_contiguous() or scale.device != data.device:
        raise ValueError(
            f"{name} must be contiguous with shape {shape} on {data.device}, got shape {tuple(scale.shape)} with "
            f"strides {scale.stride()} on {scale.device}"
        )


def _check_operands(a: Tensor, b_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    _check_offs(offs, a)
    if b_t.device != a.device:
        raise ValueError(f"both operands must be on one device, got {a.device} and {b_t.device}")
    if a.shape[1] != b_t.shape[-2]:
        raise ValueError(
            f"the contraction dimensions of a {tuple(a.shape)} and b_t {tuple(b_t.shape)} must be equal; "
            "b_t is (E, K, N) for 2d-3d and (M, K) for 2d-2d"
        )
    if b_t.dim() == 3 and b_t.shape[0] != offs.shape[0]:
        raise ValueError(f"b_t must hold one matrix for each of the {offs.shape[0]} groups, got {b_t.shape[0]}")
    for name, tensor, axis in (("a", a, -1), ("b_t", b_t, -2)):
        if tensor.stride(axis) != 1 and tensor.shape[axis] > 1 and tensor.numel() > 0:
            raise ValueError(
                f"{name} must be contiguous along the contraction axis {axis}, got shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}; use the layouts that the quantize ops return"
            )
    if out_dtype not in _INPUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")


def _check_scaled_grouped_mm(
    a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> None:
    if b_t.dim() not in (2, 3):
        raise ValueError(f"b_t must have 2 or 3 dimensions, got shape {tuple(b_t.shape)}")
    _check_fp8("a", a, 2)
    _check_fp8("b_t", b_t, b_t.dim())
    _check_operands(a, b_t, offs, out_dtype)
    if b_t.dim() == 3:
        _check_multiple_of_16(K=b_t.shape[1], N=b_t.shape[2])
        _check_scale("scale_a", scale_a, (a.shape[0],), a)
        _check_scale("scale_b", scale_b, (offs.shape[0], b_t.shape[2]), a)
    else:
        _check_multiple_of_16(N=a.shape[0], K=b_t.shape[1])
        _check_scale("scale_a", scale_a, (offs.shape[0], a.shape[0]), a)
        _check_scale("scale_b", scale_b, (offs.shape[0], b_t.shape[1]), a)


def _empty_out(a: Tensor, b_t: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    if b_t.dim() == 3:
        return a.new_empty((a.shape[0], b_t.shape[2]), dtype=out_dtype)
    return a.new_empty((offs.shape[0], a.shape[0], b_t.shape[1]), dtype=out_dtype)


class _PaddedGroups:
    """Token groups moved apart to at least one and a multiple of 16 rows each, without reading sizes on the host.

    torch's grouped GEMMs stop the process with a device assertion for other sizes, and leave the gradient of an
    empty group unwritten; the rows added here are zeros.
    """

    def __init__(self, offs: Tensor, num_rows: int) -> None:
        num_groups = offs.shape[0]
        starts = torch.cat((offs.new_zeros(1), offs[:-1]))
        sizes = offs - starts
        padded_sizes = ((sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT).clamp_min(ALIGNMENT)
        self.offs = torch.cumsum(padded_sizes, 0, dtype=torch.int32)
        shift = torch.cat((self.offs - padded_sizes - starts, offs.new_zeros(1)))

        num_padded_rows = round_up(num_rows, ALIGNMENT) + num_groups * ALIGNMENT
        padded_group = reference.group_of_row(self.offs, num_padded_rows)
        source = torch.arange(num_padded_rows, device=offs.device) - shift[padded_group]
        last_group = max(num_groups - 1, 0)
        self.is_token = (padded_group < num_groups) & (source < offs[padded_group.clamp_max(last_group)])
        self.source = source.clamp(0, max(num_rows - 1, 0))

        group = reference.group_of_row(offs, num_rows)
        self.in_group = group < num_groups
        self.target = (torch.arange(num_rows, device=offs.device) + shift[group]).clamp_max(num_padded_rows - 1)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """The groups of ``x`` along ``dim`` in the padded layout, contiguous."""
        shape = [1] * x.dim()
        shape[dim] = -1
        # Moved as integers: not every op on FP8 exists.
        integers = x.view(torch.uint8) if x.dtype == FP8_DTYPE else x
        padded = torch.where(self.is_token.view(shape), integers.index_select(dim, self.source), 0)
        return padded.view(x.dtype)

    def unpad(self, out: Tensor) -> Tensor:
        """The rows of ``out`` back in the original layout, zeros in rows of no group."""
        return torch.where(self.in_group[:, None], out.index_select(0, self.target), 0)


def _torch_scaled_grouped_mm(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    groups = _PaddedGroups(offs, a.shape[0] if b_t.dim() == 3 else a.shape[1])
    if b_t.dim() == 3:
        out = torch._scaled_grouped_mm(
            groups.pad(a, 0),
            b_t,
            groups.pad(scale_a, 0),
            scale_b,
            offs=groups.offs,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast_accum,
        )
        return groups.unpad(out).to(out_dtype)
    out = torch._scaled_grouped_mm(
        groups.pad(a, 1),
        groups.pad(b_t.t(), 1).t(),
        scale_a.view(-1),
        scale_b.view(-1),
        offs=groups.offs,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast_accum,
    )
    return out.to(out_dtype)


@torch.library.custom_op("titan_fp8moe::scaled_grouped_mm", mutates_args=())
def scaled_grouped_mm(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
    gemm_backend: str = "auto",
) -> Tensor:
    """FP8 grouped GEMM with rowwise scales: ``(a @ b_t) * scale_a * scale_b`` per token group, accumulated in float32.

    Two forms, chosen by the dimensions of ``b_t``:

    - 2d-3d (forward, dgrad): a ``(M, K)`` row-major, b_t ``(E, K, N)`` K-contiguous, scale_a ``(M,)``, scale_b
      ``(E, N)``. Groups are ranges of rows of a. Returns ``(M, N)``, zeros past ``offs[-1]``.
    - 2d-2d (wgrad): a ``(N, M)`` row-major, b_t ``(M, K)`` column-major, scale_a ``(E, N)``, scale_b ``(E, K)``.
      Groups are ranges of the contraction M. Returns ``(E, N, K)``, zeros for an empty group.

    Args:
        a, b_t: e4m3, in the layouts that the quantize ops return; K and N divisible by 16, M and groups of any size.
        scale_a, scale_b: contiguous.
        offs: ``(E,)``.
        out_dtype: bf16 or fp32; torch's kernel computes bf16, whatever is asked for.
        fast_accum: let the tensor cores keep partial sums at reduced precision.
        gemm_backend: ``"auto"``, ``"torch"`` or ``"reference"``; see `resolve_gemm_backend`. A CPU tensor always
            takes the reference.

    Raises:
        ValueError, TypeError: an operand of the wrong shape, layout, dtype or device.
        RuntimeError: no FP8 grouped GEMM on this GPU.
    """
    _check_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)
    backend = resolve_gemm_backend(gemm_backend, a.device)
    if a.numel() == 0 or b_t.numel() == 0:
        return _empty_out(a, b_t, offs, out_dtype).zero_()
    if backend == "torch":
        return _torch_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype, fast_accum)
    return reference.scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)


@scaled_grouped_mm.register_fake
def _(
    a: Tensor,
    b_t: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool = True,
    gemm_backend: str = "auto",
) -> Tensor:
    _check_scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, out_dtype)
    return _empty_out(a, b_t, offs, out_dtype)


def _check_grouped_mm_wgrad(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> None:
    _check_input("grad", grad, 2)
    _check_input("x", x, 2)
    _check_offs(offs, grad)
    if x.device != grad.device or x.shape[0] != grad.shape[0]:
        raise ValueError(
            f"grad and x must have the same rows on one device, got {tuple(grad.shape)} on {grad.device} and "
            f"{tuple(x.shape)} on {x.device}"
        )
    if out_dtype not in _INPUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    _check_multiple_of_16(N=grad.shape[1], K=x.shape[1])


@torch.library.custom_op("titan_fp8moe::grouped_mm_wgrad", mutates_args=())
def grouped_mm_wgrad(
    grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, gemm_backend: str = "auto"
) -> Tensor:
    """Weight gradient in bf16, of the recipe ``rowwise_with_gw_hp``: ``grad.T @ x`` per token group.

    Args:
        grad: ``(M, N)`` bf16 or fp32 (rounded to bf16), any strides; N divisible by 16.
        x: ``(M, K)`` likewise.
        offs: ``(E,)``.
        out_dtype: bf16 or fp32; torch's kernel computes bf16, whatever is asked for.
        gemm_backend: as for `scaled_grouped_mm`.

    Returns:
        ``(E, N, K)``, zeros for an empty group.
    """
    _check_grouped_mm_wgrad(grad, x, offs, out_dtype)
    grad, x = grad.bfloat16(), x.bfloat16()
    if resolve_gemm_backend(gemm_backend, grad.device) == "reference":
        return reference.grouped_mm(grad.t(), x, offs, out_dtype)
    if grad.numel() == 0 or x.numel() == 0 or offs.numel() == 0:
        return x.new_zeros((offs.shape[0], grad.shape[1], x.shape[1]), dtype=out_dtype)
    groups = _PaddedGroups(offs, grad.shape[0])
    out = torch._grouped_mm(groups.pad(grad, 0).t(), groups.pad(x, 0), offs=groups.offs)
    return out.to(out_dtype)


@grouped_mm_wgrad.register_fake
def _(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype, gemm_backend: str = "auto") -> Tensor:
    _check_grouped_mm_wgrad(grad, x, offs, out_dtype)
    return grad.new_empty((offs.shape[0], grad.shape[1], x.shape[1]), dtype=out_dtype)
