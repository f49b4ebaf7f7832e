"""`NumericsLog`: what FP8 does to the experts' numbers, measured on the batch in training every few steps.

Looked at when a loss curve bends: are small values lost, do magnitudes drift, how far is the output from bf16's?
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torchtitan.components.metrics import BaseLogger
from torchtitan.models.moe.moe import _run_experts_grouped_mm
from torchtitan.tools.logging import logger

from titan_fp8moe import ops
from titan_fp8moe.modules import Float8GroupedExperts

OPERANDS = ("x", "w1", "w2", "w3", "grad")
PIECE = 4096
"""Rows that are measured at a time: temporaries stay small beside the tensors."""


def _measure_rows(pieces: Iterable[Tensor], round_scales_to_power_of_2: bool) -> list[Tensor]:
    """Share of the nonzero elements that quantise to zero; smallest row amax that is not zero; largest row amax.

    Args:
        pieces: ``(rows, K)`` tensors, each row under a scale of its own.
        round_scales_to_power_of_2: as the experts quantise.
    """
    lost, nonzero, amax = 0, 0, []
    for piece in pieces:
        q, _ = ops.quantize_rowwise(piece, round_scales_to_power_of_2)
        is_nonzero = piece != 0
        lost += (is_nonzero & (q.view(torch.uint8) & 0x7F == 0)).sum()
        nonzero += is_nonzero.sum()
        amax.append(piece.abs().amax(1).float())
    amax = torch.cat(amax)
    largest = amax.max()
    # Rows of zeros are padding, or experts' features that are off: they have no range.
    return [lost / nonzero.clamp_min(1), torch.where(amax == 0, largest, amax).min(), largest]


def _sqnr_db(actual: Tensor, expected: Tensor) -> Tensor:
    signal = noise = 0
    for a, e in zip(actual.split(PIECE), expected.split(PIECE), strict=True):
        e = e.float()
        signal += e.square().sum()
        noise += (e - a.float()).square().sum()
    return 10 * torch.log10(signal / noise)


def _zero_past_last_group(x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    past = torch.arange(x.shape[0], device=x.device) >= num_tokens_per_expert.sum()
    return x.masked_fill(past[:, None], 0)


# Operators are opaque: selective activation checkpointing records the operators of a forward and expects the same ones
# when it recomputes, in which nothing is measured.
@ops.Operator
def measure_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    num_tokens_per_expert: Tensor,
    out: Tensor,
    round_scales_to_power_of_2: bool,
) -> Tensor:
    """SQNR in dB of ``out`` against torchtitan's bf16 experts, then `_measure_rows` of x, w1, w2, w3.

    Args:
        x: ``(M, K)`` tokens sorted by expert; rows past the last expert's count for nothing.
        w1, w3: ``(E, H, K)``.
        w2: ``(E, K, H)``.
        num_tokens_per_expert: ``(E,)`` integers.
        out: ``(M, K)``, what the FP8 experts returned.
        round_scales_to_power_of_2: as the experts quantise.

    Returns:
        float32 ``(13,)``.
    """
    expected = _run_experts_grouped_mm(w1, w2, w3, x, num_tokens_per_expert)
    expected, actual, x = (_zero_past_last_group(t, num_tokens_per_expert) for t in (expected, out, x))
    measured = [_sqnr_db(actual, expected)]
    for pieces in (x.split(PIECE), w1, w2, w3):
        measured += _measure_rows(pieces, round_scales_to_power_of_2)
    return torch.stack(measured)


class NumericsLog:
    """Measures watched experts modules in the first training step and in each whose number ``freq`` divides.

    Each process measures what it holds: its tokens, and its experts or its shard of them. Of a step it is the first
    microbatch. Figures are logged by every process, as the loss is, and go to the metric logger, which writes on the
    ranks that torchtitan has chosen.

    Args:
        freq: steps from one measurement to the next, at least 1.
        round_scales_to_power_of_2: as the experts quantise.
        metric_logger: one of torchtitan's; closed when the process ends.
    """

    def __init__(self, freq: int, round_scales_to_power_of_2: bool, metric_logger: BaseLogger) -> None:
        self.freq = freq
        self.round_scales_to_power_of_2 = round_scales_to_power_of_2
        self.metric_logger = metric_logger
        self._due = True
        self._measured: dict[str, list[Tensor]] = {}
        self._step: int | None = None
        self._optimizer: Optimizer | None = None
        # No converter is told the step, and a resumed run does not begin at 1; optimizers count.
        self._optimizer_hook = register_optimizer_step_post_hook(self._remember_optimizer)
        weakref.finalize(self, metric_logger.close)

    def watch(self, fqn: str, experts: Float8GroupedExperts) -> None:
        """Measure ``experts`` under the name ``fqn``. Called before parallelisms add hooks of their own: tokens are
        then measured as dispatched, outputs before they are combined, weights while FSDP has them gathered."""

        # A function and not a method: pipeline parallelism copies the model for each stage, and copies of a function
        # are the same function.
        def measure(experts: Float8GroupedExperts, args: tuple[Tensor, Tensor], out: Tensor) -> None:
            # Once a step: not in recomputation, in later microbatches or in validation.
            if self._due and experts.training and fqn not in self._measured and out.shape[0] > 0:
                self._measure(fqn, experts, *args, out)

        experts.register_forward_hook(measure)

    @torch.no_grad()
    def _measure(
        self, fqn: str, experts: Float8GroupedExperts, x: Tensor, num_tokens_per_expert: Tensor, out: Tensor
    ) -> None:
        pow2 = self.round_scales_to_power_of_2
        measured = [measure_experts(x, *experts.local_weights(), num_tokens_per_expert, out, pow2)]
        self._measured[fqn] = measured

        def measure_gradient(grad: Tensor) -> None:
            if len(measured) == 1:
                grad = _zero_past_last_group(grad, num_tokens_per_expert)
                measured.append(torch.stack(_measure_rows(grad.split(PIECE), pow2)))

        if out.requires_grad:
            out.register_hook(measure_gradient)

    def _remember_optimizer(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if optimizer.state:  # torchtitan's container of optimizers is an optimizer without a state
            self._optimizer = optimizer

    def _first_step(self) -> int:
        # Read here and not in the hook: to make its state, loading a checkpoint has the optimizer take an empty step.
        self._optimizer_hook.remove()
        optimizer, self._optimizer = self._optimizer, None
        states = optimizer.state.values() if optimizer is not None else ()
        return max((int(state["step"]) for state in states if "step" in state), default=1)

    def step_done(self) -> None:
        """Report what the step that ends here has measured. Called after each step of the optimizers."""
        self._step = self._first_step() if self._step is None else self._step + 1
        for fqn, measured in self._measured.items():
            self._report(fqn, torch.cat(measured).tolist())
        self._measured = {}
        self._due = (self._step + 1) % self.freq == 0

    def _report(self, fqn: str, measured: list[float]) -> None:
        sqnr_db, *rest = measured
        metrics = {f"{fqn}/output_sqnr_db": sqnr_db}
        underflow, amax = [], []
        # Without a gradient the last operand is missing.
        for operand, lost, smallest, largest in zip(OPERANDS, rest[::3], rest[1::3], rest[2::3], strict=False):
            metrics[f"{fqn}/{operand}_underflow"] = lost
            metrics[f"{fqn}/{operand}_amax_min"] = smallest
            metrics[f"{fqn}/{operand}_amax_max"] = largest
            underflow.append(f"{operand} {lost:.3%}")
            amax.append(f"{operand} {smallest:.3g}..{largest:.3g}")
        self.metric_logger.log(metrics, self._step)
        logger.info(
            f"fp8moe: step {self._step}  {fqn}  output SQNR {sqnr_db:.2f} dB  underflow {', '.join(underflow)}  "
            f"row amax {', '.join(amax)}"
        )
