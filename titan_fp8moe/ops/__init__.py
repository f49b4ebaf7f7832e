"""The operators as torch custom ops: each checks, allocates and launches; each has a fake twin.

``torch.ops.titan_fp8moe.*`` trace through ``torch.compile(fullgraph=True)``, run on meta and fake tensors and have no
autograd of their own: `float8_grouped_mm` and `float8_experts` are the differentiable calls. On a GPU with FP8 tensor
cores they launch Triton kernels, elsewhere they run the pure-torch reference.

Shapes: M tokens, K in, N out, E experts. ``offs`` is int32 ``(E,)`` on the device of the data: non-decreasing end
offsets of the token groups, ``offs[-1] <= M``; it is not read on the host outside the reference path. Rows at or past
``offs[-1]`` belong to no group. A scale is float32 and multiplies: ``x ≈ q.float() * scale``.
"""

from titan_fp8moe.ops.grouped_gemm import (
    GEMM_BACKENDS,
    grouped_mm_wgrad,
    resolve_gemm_backend,
    scaled_grouped_mm,
)
from titan_fp8moe.ops.groups import padded_offs
from titan_fp8moe.ops.library import Operator
from titan_fp8moe.ops.quantize import (
    quantize_colwise_per_group,
    quantize_rowwise,
    quantize_rowwise_and_colwise_per_group,
    quantize_rowwise_per_group,
    requantize_colwise_per_group,
)
from titan_fp8moe.ops.quantize_weight import (
    quantize_joint_weight,
    quantize_joint_weight_colwise,
    quantize_weight,
    quantize_weight_colwise,
    quantize_weight_rowwise,
)
from titan_fp8moe.ops.swiglu import (
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_backward_quantize_rowwise,
    swiglu_quantize_rowwise,
)

__all__ = [
    "GEMM_BACKENDS",
    "Operator",
    "grouped_mm_wgrad",
    "padded_offs",
    "quantize_colwise_per_group",
    "quantize_joint_weight",
    "quantize_joint_weight_colwise",
    "quantize_rowwise",
    "quantize_rowwise_and_colwise_per_group",
    "quantize_rowwise_per_group",
    "quantize_weight",
    "quantize_weight_colwise",
    "quantize_weight_rowwise",
    "requantize_colwise_per_group",
    "resolve_gemm_backend",
    "scaled_grouped_mm",
    "swiglu_backward",
    "swiglu_backward_quantize",
    "swiglu_backward_quantize_rowwise",
    "swiglu_quantize_rowwise",
]
