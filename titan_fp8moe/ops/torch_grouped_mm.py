"""torch's own grouped GEMMs, made safe for token groups of any size."""

import torch
from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import ALIGNMENT, FP8_DTYPE, round_up


class _PaddedGroups:
    """Token groups moved apart to at least one and a multiple of 16 rows each, without reading sizes on the host.

    torch's grouped GEMMs stop the process with a device assertion for other sizes, and leave the gradient of an
    empty group unwritten; the rows added here are zeros.
    """

    def __init__(self, offs: Tensor, num_rows: int) -> None:
        num_groups = offs.shape[0]
        # Whatever offs holds, no group reaches out of bounds. torch's kernels would follow it.
        offs = offs.clamp(0, num_rows).cummax(0).values
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


def scaled_grouped_mm(
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


def grouped_mm_wgrad(grad: Tensor, x: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Tensor:
    groups = _PaddedGroups(offs, grad.shape[0])
    out = torch._grouped_mm(groups.pad(grad, 0).t(), groups.pad(x, 0), offs=groups.offs)
    return out.to(out_dtype)
