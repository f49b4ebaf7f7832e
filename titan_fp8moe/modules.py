"""`Float8GroupedExperts`: torchtitan's experts module with its grouped GEMMs in FP8."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.kernels import generate_permute_indices
from torchtitan.models.moe.moe import GroupedExperts

from titan_fp8moe.experts import float8_experts
from titan_fp8moe.weight_cache import QuantizedWeightCache

RunExperts = Callable[..., Tensor]
_num_built = itertools.count()


@contextmanager
def _token_group_alignment(alignment: int) -> Iterator[None]:
    # torchtitan keeps the alignment in one global of the process. It is set for the call alone, so that a model that
    # is not converted trains as if this package were not there.
    previous = moe_utils.TOKEN_GROUP_ALIGN_SIZE_M
    moe_utils.set_token_group_alignment_size_m(alignment)
    try:
        yield
    finally:
        moe_utils.set_token_group_alignment_size_m(previous)


def build_run_experts(options: dict[str, str | bool], compile_backend: str | None) -> RunExperts:
    """The function that a converted module runs on local tensors, compiled when ``compile_backend`` is given.

    One function serves all modules of a model, so that they share what was compiled. It takes w1, w2, w3, x,
    num_tokens_per_expert and, where they are at hand, the ``quantized_weights`` of `float8_experts`.

    Args:
        options: keyword arguments of `float8_experts`.
        compile_backend: for ``torch.compile``; None runs eagerly.
    """

    def run_experts(
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        x: Tensor,
        num_tokens_per_expert: Tensor,
        quantized_weights: tuple[Tensor, ...] = (),
    ) -> Tensor:
        offs = torch.cumsum(num_tokens_per_expert, 0, dtype=torch.int32)
        return float8_experts(x, w1, w2, w3, offs, **options, quantized_weights=quantized_weights)

    if compile_backend is None:
        return run_experts

    # Dynamo counts recompilations by code object, which all functions made here would share: one model more in a
    # process would bring the others nearer to the limit.
    run_experts.__code__ = run_experts.__code__.replace(co_name=f"run_experts_{next(_num_built)}")
    compiled = torch.compile(run_experts, backend=compile_backend, fullgraph=True)

    def run_compiled_experts(
        w1: Tensor,
        w2: Tensor,
        w3: Tensor,
        x: Tensor,
        num_tokens_per_expert: Tensor,
        quantized_weights: tuple[Tensor, ...] = (),
    ) -> Tensor:
        # The number of tokens differs from step to step under expert parallelism, and in validation. Sizes of 0 and 1
        # are constants to a compiler, which would compile for each. (One that traces this may not know the size.)
        if not torch.compiler.is_compiling() and x.shape[0] < 2:
            return run_experts(w1, w2, w3, x, num_tokens_per_expert, quantized_weights)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return compiled(w1, w2, w3, x, num_tokens_per_expert, quantized_weights)

    return run_compiled_experts


class Float8GroupedExperts(GroupedExperts):
    """``GroupedExperts`` whose forward, dgrad and wgrad run as FP8 grouped GEMMs.

    Made from a ``GroupedExperts`` by `titan_fp8moe.convert_experts`, in place: parameters, their names and hooks stay
    what they were, so checkpoints and parallelisms see no difference.

    Attributes:
        run_experts: see `build_run_experts`.
        token_group_alignment: multiple that each expert's tokens are padded to; with 1 they are used as they come.
        weight_cache: keeps FP8 weights until they change; None quantises them in every forward. Whoever steps the
            optimizer clears it.
    """

    run_experts: RunExperts
    token_group_alignment: int
    weight_cache: QuantizedWeightCache | None

    def __call__(self, *args, **kwargs):
        # Around the hooks too: torchtitan's expert parallelism dispatches and pads tokens in one.
        with _token_group_alignment(self.token_group_alignment):
            return super().__call__(*args, **kwargs)

    def local_weights(self) -> list[Tensor]:
        """w1, w2, w3, or this process's shards of them."""
        return [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]

    def _apply(self, *args, **kwargs):
        # Moved, or cast: what was made of the weights before would stay where they were.
        if self.weight_cache is not None:
            self.weight_cache.clear()
        return super()._apply(*args, **kwargs)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """
        Args:
            x: ``(M, dim)`` tokens sorted by expert.
            num_tokens_per_expert: ``(E,)`` integers on the device of x.

        Returns:
            ``(M, dim)`` in x's dtype, zeros in rows of no expert.

        Raises:
            RuntimeError: x is on the CPU, where torchtitan cannot pad without `titan_fp8moe.cpu`.
        """
        weights = self.local_weights()
        padded_by_dispatcher = isinstance(self.w1, DTensor) and "ep" in self.w1.device_mesh.mesh_dim_names
        run_experts = self.run_experts
        # A compiler would take what is in the cache for constants. Evaluation neither fills nor uses it: averages
        # of weights are often swapped in for it, and out again, by writes that torch does not count.
        if self.weight_cache is not None and self.training and not torch.compiler.is_compiling():
            run_experts = partial(
                run_experts, quantized_weights=self.weight_cache.get((self.w1, self.w2, self.w3), weights)
            )
        if padded_by_dispatcher or self.token_group_alignment == 1:
            return run_experts(*weights, x, num_tokens_per_expert)
        if x.device.type == "cpu" and moe_utils.generate_permute_indices is generate_permute_indices:
            raise RuntimeError(
                f"torchtitan pads token groups, here to {self.token_group_alignment}, with a kernel for GPUs, got x on "
                "the CPU; set token_group_alignment to 1, or import titan_fp8moe.cpu where there is no accelerator"
            )
        out = moe_utils.indices_padding_wrapper(run_experts)(*weights, x, num_tokens_per_expert)
        # What torchtitan scatters back leaves rows of no expert as the memory was.
        in_group = torch.arange(x.shape[0], device=x.device) < num_tokens_per_expert.sum()
        return torch.where(in_group[:, None], out, out.new_zeros(()))
