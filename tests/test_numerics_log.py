"""`NumericsLog`: its figures against a direct computation, and when it measures."""

import copy
import logging
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from numerics import normal, sqnr_db
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import optimizer as optim
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts

from titan_fp8moe import FP8MoE, convert_experts, ops
from titan_fp8moe.converter import Float8MoEConverter
from titan_fp8moe.float8 import FP8_DTYPE
from titan_fp8moe.numerics_log import NumericsLog

E, DIM, HIDDEN = 4, 32, 48
SIZES = [5, 0, 17, 1]


class RecordingLogger(BaseLogger):
    def __init__(self):
        self.metrics: dict[int, dict[str, float]] = {}
        self.closed = 0

    def log(self, metrics, step):
        self.metrics.setdefault(step, {}).update(metrics)

    def close(self):
        self.closed += 1


class Model(nn.Module):
    """Two experts modules, one after the other."""

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.experts = nn.ModuleList(GroupedExperts(DIM, HIDDEN, E, use_grouped_mm=True) for _ in range(2))
        for i, weight in enumerate(self.parameters()):
            weight.data = normal(*weight.shape, seed=i) / math.sqrt(weight.shape[-1])
        self.to(device, dtype)
        # Without padding, tokens may lie past the last group.
        self.fqns = convert_experts(self, FP8MoE(token_group_alignment=1))

    def forward(self, x: Tensor, sizes: list[int] = SIZES) -> Tensor:
        counts = torch.tensor(sizes, device=x.device)
        for experts in self.experts:
            x = experts(x, counts)
        return x


@pytest.fixture
def watch():
    """Watches a model; the hook that waits for an optimizer goes when the test ends."""
    logs = []

    def watch(model: Model, freq: int = 1, pow2: bool = True) -> tuple[NumericsLog, RecordingLogger]:
        logs.append(NumericsLog(freq, pow2, RecordingLogger()))
        for fqn in model.fqns:
            logs[-1].watch(fqn, model.get_submodule(fqn))
        return logs[-1], logs[-1].metric_logger

    yield watch
    for log in logs:
        log._optimizer_hook.remove()


def tokens(seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return normal(sum(SIZES), DIM, seed=seed, device=device, dtype=dtype)


# ---- figures ---------------------------------------------------------------------------------------------------------


def rows_directly(rows: Tensor, pow2: bool) -> tuple[float, float, float]:
    """Underflow and the range of row amax in float64, from the definition of the scale."""
    rows = rows.detach().double()
    amax = rows.abs().amax(1)
    scale = amax / 448
    if pow2:
        scale = 2.0 ** torch.ceil(torch.log2(scale))
    q = (rows / torch.where(amax > 0, scale, 1)[:, None]).float().to(FP8_DTYPE).float()
    lost = ((rows != 0) & (q == 0)).sum() / (rows != 0).sum()
    return lost.item(), amax[amax > 0].min().item(), amax.max().item()


def experts_bf16(experts: GroupedExperts, x: Tensor) -> Tensor:
    out = []
    for e, rows in enumerate(x.bfloat16().split(SIZES)):
        w1, w2, w3 = (w[e].bfloat16().t() for w in (experts.w1, experts.w2, experts.w3))
        out.append((F.silu(rows @ w1) * (rows @ w3)) @ w2)
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("pow2", [True, False])
def test_figures_are_those_of_a_direct_computation(watch, device, dtype, pow2):
    model = Model(device, dtype)
    first = model.experts[0]
    log, recorded = watch(model, pow2=pow2)
    x = tokens(device=device, dtype=dtype)
    x[:, ::4] *= 1e-6  # 448 and the smallest number that is not rounded to zero are 2**19 apart
    x[3] = 0
    with torch.no_grad():
        first.w2[:, :, :8] *= 3e-6
        first.w1[2] = 0
    grad = normal(sum(SIZES), DIM, seed=7, device=device, dtype=dtype)
    grad[:, 1::8] *= 1e-7
    # Rows past the last group belong to nobody.
    slack = torch.full((3, DIM), torch.nan, device=device, dtype=dtype)

    counts = torch.tensor(SIZES, device=device)
    out = first(torch.cat([x, slack]).requires_grad_(), counts)
    out.backward(torch.cat([grad, slack]))
    log.step_done()

    metrics = {name.removeprefix("experts.0/"): value for name, value in recorded.metrics[1].items()}
    expected_sqnr_db = sqnr_db(out[: sum(SIZES)], experts_bf16(first, x))
    # Products in bf16 are summed in other orders.
    assert metrics.pop("output_sqnr_db") == pytest.approx(expected_sqnr_db, abs=0.1)
    operands = {"x": x, "w1": first.w1, "w2": first.w2, "w3": first.w3, "grad": grad}
    assert len(metrics) == 3 * len(operands)
    for name, operand in operands.items():
        lost, smallest, largest = rows_directly(operand.flatten(0, -2), pow2)
        assert metrics[f"{name}_underflow"] == pytest.approx(lost, rel=1e-6), name
        assert metrics[f"{name}_amax_min"] == pytest.approx(smallest, rel=1e-6), name
        assert metrics[f"{name}_amax_max"] == pytest.approx(largest, rel=1e-6), name
    assert all(metrics[f"{name}_underflow"] > 0.05 for name in ("x", "w2", "grad"))
    assert metrics["w3_underflow"] < 0.01


def test_an_overflow_stays_visible(watch):
    model = Model()
    log, recorded = watch(model)
    x = tokens()
    x[2, 3] = torch.inf
    model(x).sum().backward()
    log.step_done()
    assert recorded.metrics[1]["experts.0/x_amax_max"] == math.inf
    assert math.isnan(recorded.metrics[1]["experts.0/output_sqnr_db"])
    assert 0 <= recorded.metrics[1]["experts.0/x_underflow"] <= 1


def test_long_tensors_are_measured_piece_by_piece(watch, monkeypatch):
    figures = []
    for piece in (4096, 7):
        monkeypatch.setattr("titan_fp8moe.numerics_log.PIECE", piece)
        model = Model()
        log, recorded = watch(model)
        model(tokens().requires_grad_()).sum().backward()
        log.step_done()
        figures.append(recorded.metrics[1])
    assert figures[1] == pytest.approx(figures[0], rel=1e-5)


def test_no_tokens_are_not_measured(watch):
    model = Model()
    log, recorded = watch(model)
    model(tokens()[:0], [0] * E)
    log.step_done()
    assert recorded.metrics == {}


def test_the_line_says_what_the_metrics_say(watch, caplog):
    model = Model()
    log, recorded = watch(model)
    model(tokens()).sum().backward()
    with caplog.at_level(logging.INFO):
        log.step_done()
    m = {name.removeprefix("experts.0/"): value for name, value in recorded.metrics[1].items()}
    operands = ("x", "w1", "w2", "w3", "grad")
    underflow = ", ".join(f"{operand} {m[f'{operand}_underflow']:.3%}" for operand in operands)
    amax = ", ".join(
        f"{operand} {m[f'{operand}_amax_min']:.3g}..{m[f'{operand}_amax_max']:.3g}" for operand in operands
    )
    assert caplog.messages[0] == (
        f"fp8moe: step 1  experts.0  output SQNR {m['output_sqnr_db']:.2f} dB  underflow {underflow}  row amax {amax}"
    )
    assert caplog.messages[1].startswith("fp8moe: step 1  experts.1  output SQNR ")
    assert len(caplog.messages) == 2


# ---- when it measures ------------------------------------------------------------------------------------------------


def train(model: Model, log: NumericsLog, optimizer: torch.optim.Optimizer, num_steps: int, microbatches: int = 1):
    for step in range(num_steps):
        optimizer.zero_grad()
        for i in range(microbatches):
            model(tokens(seed=100 * step + i)).float().square().sum().backward()
        optimizer.step()
        log.step_done()


def test_the_first_step_and_every_nth_are_logged(watch):
    model = Model()
    log, recorded = watch(model, freq=3)
    train(model, log, torch.optim.AdamW(model.parameters()), 7)
    assert list(recorded.metrics) == [1, 3, 6]
    assert all(len(metrics) == 2 * 16 for metrics in recorded.metrics.values())


def test_a_resumed_run_goes_on_counting(watch):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    log, _ = watch(model)
    train(model, log, optimizer, 7)
    state = optimizer.state_dict()

    model = Model()
    resumed = torch.optim.AdamW(model.parameters())
    log, recorded = watch(model, freq=5)
    # What torchtitan's checkpoints do first, an empty step of the optimizer among it.
    get_optimizer_state_dict(model, resumed)
    resumed.load_state_dict(state)
    train(model, log, resumed, 9)
    assert list(recorded.metrics) == [8, 10, 15]


def test_an_optimizer_that_does_not_count_starts_at_one(watch):
    model = Model()
    log, recorded = watch(model, freq=2)
    train(model, log, torch.optim.SGD(model.parameters(), lr=1e-3), 4)
    assert list(recorded.metrics) == [1, 2, 4]


def test_the_first_microbatch_of_a_step_is_measured(watch):
    figures = []
    for microbatches in (1, 3):
        model = Model()
        log, recorded = watch(model)
        train(model, log, torch.optim.AdamW(model.parameters()), 1, microbatches)
        figures.append(recorded.metrics)
    assert figures[0] == figures[1]


def test_validation_is_not_measured(watch):
    model = Model()
    log, recorded = watch(model, freq=1)
    model.eval()
    with torch.no_grad():
        model(tokens(seed=5))
    model.train()
    model(tokens()).sum().backward()
    log.step_done()
    validated = recorded.metrics[1]

    model = Model()
    log, recorded = watch(model, freq=1)
    model(tokens()).sum().backward()
    log.step_done()
    assert validated == recorded.metrics[1]


SAVED = [ops.quantize_rowwise.overload, ops.scaled_grouped_mm.overload, torch.ops.aten._grouped_mm.default]


@pytest.mark.parametrize("selective", [False, True], ids=["full", "selective"])
def test_recomputation_is_neither_measured_nor_disturbed(watch, selective):
    kept = partial(create_selective_checkpoint_contexts, SAVED) if selective else lambda: (nullcontext(), nullcontext())

    def step(model: Model, checkpointed: bool) -> list[Tensor]:
        x = tokens().requires_grad_()
        out = checkpoint(model, x, use_reentrant=False, context_fn=kept) if checkpointed else model(x)
        out.float().square().sum().backward()
        return [x.grad, *(weight.grad for weight in model.parameters())]

    expected = step(Model(), checkpointed=False)
    model = Model()
    log, recorded = watch(model)
    for actual, wanted in zip(step(model, checkpointed=True), expected, strict=True):
        assert torch.equal(actual, wanted)
    log.step_done()

    model = Model()
    log, plain = watch(model)
    step(model, checkpointed=False)
    log.step_done()
    assert recorded.metrics == plain.metrics


def test_copies_for_pipeline_stages_share_the_log(watch):
    model = Model()
    log, recorded = watch(model)
    stage = copy.deepcopy(model)
    del stage.experts[1]
    stage(tokens()).sum().backward()
    log.step_done()
    assert {name.split("/")[0] for name in recorded.metrics[1]} == {"experts.0"}


# ---- the converter ---------------------------------------------------------------------------------------------------


def convert_with_torchtitan(model: nn.Module, *flags: str) -> Float8MoEConverter:
    job_config: JobConfig = ConfigManager().parse_args(
        ["--job.custom_config_module=titan_fp8moe.job_config", "--model.converters=fp8moe", *flags]
    )
    parallel_dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    converter = Float8MoEConverter(job_config, parallel_dims)
    converter.convert(model)
    return converter


def test_off_registers_nothing():
    before = len(optim._global_optimizer_post_hooks)
    model = Model()
    converter = convert_with_torchtitan(model)
    assert converter.numerics_log is None
    assert not any(experts._forward_hooks for experts in model.experts)
    assert len(optim._global_optimizer_post_hooks) == before
    converter.post_optimizer_hook([model])


def test_on_measures_what_is_converted_and_closes_the_logger(monkeypatch):
    recorded = RecordingLogger()
    asked = []

    def build_metrics_processor(job_config, parallel_dims, tag):
        asked.append(tag)
        return type("MetricsProcessor", (), {"logger": recorded})

    monkeypatch.setattr("titan_fp8moe.converter.build_metrics_processor", build_metrics_processor)
    before = len(optim._global_optimizer_post_hooks)
    model = Model()
    converter = convert_with_torchtitan(
        model, "--fp8moe.log_numerics_freq=2", "--fp8moe.exclude_fqns=experts.0", "--fp8moe.token_group_alignment=1"
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(tokens()).sum().backward()
        optimizer.step()
        converter.post_optimizer_hook([model])
    assert asked == ["fp8moe"]
    assert list(recorded.metrics) == [1, 2]
    assert {name.split("/")[0] for name in recorded.metrics[2]} == {"experts.1"}
    # Waiting for the first step of the optimizer is over.
    assert len(optim._global_optimizer_post_hooks) == before
    assert recorded.closed == 0
    for experts in model.experts:  # the hooks hold the log
        experts._forward_hooks.clear()
    del converter
    assert recorded.closed == 1
