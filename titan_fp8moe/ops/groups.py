"""Where token groups lie in the operands of a weight gradient."""

from torch import Tensor

from titan_fp8moe import reference
from titan_fp8moe.float8 import GROUP_TILE
from titan_fp8moe.kernels import padded_offs as kernels
from titan_fp8moe.ops.checks import check_offs, is_hopper, on_device
from titan_fp8moe.ops.library import Operator


@Operator
def padded_offs(offs: Tensor) -> Tensor:
    """End offsets ``(E,)`` int32 of groups whose sizes, from ``offs (E,)``, are rounded up to `GROUP_TILE`.

    Args:
        offs: ``(E,)``.
    """
    check_offs(offs, offs)
    if offs.numel() == 0:
        return offs.new_empty(0)
    if not is_hopper(offs.device):
        return reference.padded_offs(offs)
    offs = offs.contiguous()
    out = offs.new_empty(offs.shape)
    with on_device(offs):
        kernels.padded_offs(offs, out, GROUP_TILE)
    return out


@padded_offs.register_fake
def _(offs: Tensor) -> Tensor:
    check_offs(offs, offs)
    return offs.new_empty(offs.shape)
