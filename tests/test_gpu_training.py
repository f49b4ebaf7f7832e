"""Training steps of an MoE layer with the real kernels: every recipe, compiled or not, under each way to recompute."""

import dataclasses

import pytest
import torch
import triton
from numerics import normal, sqnr_db
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama4.infra.parallelize import _op_sac_save_list
from torchtitan.models.moe import MoE, MoEArgs

from titan_fp8moe import FP8MoE, convert_experts
from titan_fp8moe.converter import clear_quantized_weights

pytestmark = pytest.mark.gpu

DEVICE, BACKEND = "cuda", "inductor"
DIM, HIDDEN_DIM, NUM_EXPERTS = 512, 768, 8
MIN_SQNR_DB = 22
# Multiples of 16 and others, growing and shrinking, fewer tokens than experts; from the fourth on nothing may compile.
TOKENS = (300, 256, 77, 512, 1, 1000, 48, 5, 333, 2048)
SETTLED = 3
CHECKPOINTING = {
    "none": ActivationCheckpoint(mode="none"),
    "selective op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
    "full": ActivationCheckpoint(mode="full"),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        args = MoEArgs(num_experts=NUM_EXPERTS, num_shared_experts=0, top_k=2)
        self.moe = MoE(args, dim=DIM, hidden_dim=HIDDEN_DIM)
        for seed, parameter in enumerate(self.moe.parameters()):
            parameter.data = normal(*parameter.shape, seed=seed) * parameter.shape[-1] ** -0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(x)


class Model(nn.Module):
    """One MoE layer where torchtitan looks for layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers["0"](x)


def build(config: FP8MoE | None, checkpointing: str, backend=None, cache: bool = False) -> Model:
    model = Model().to(DEVICE, torch.bfloat16)
    if config is not None:
        convert_experts(model, config, compile_backend=backend, cache_quantized_weights=cache)
    ac_config = dataclasses.replace(CHECKPOINTING[checkpointing])
    if ac_config.mode != "none":
        # What the converter adds to the list of llama4.
        saved = _op_sac_save_list | {torch.ops.titan_fp8moe.scaled_grouped_mm.default}
        apply_ac(model, ac_config, model_compile_enabled=backend is not None, op_sac_save_list=saved)
    return model


def step(model: Model, num_tokens: int) -> list[torch.Tensor]:
    """The output and all gradients of a step on ``num_tokens`` tokens; the weights stay."""
    x = normal(1, num_tokens, DIM, seed=num_tokens, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    grad = normal(1, num_tokens, DIM, seed=num_tokens + 1, device=DEVICE, dtype=torch.bfloat16)
    out = model(x)
    out.backward(grad)
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    model.zero_grad()
    return [out.detach(), *gradients]


@pytest.fixture
def compiled_kernels(monkeypatch) -> list[str]:
    """This package's Triton kernels, as they are compiled."""
    names = []

    def record(*, fn, **kwargs):
        if fn.module.startswith("titan_fp8moe"):
            names.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", record)
    return names


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
def test_gradients_are_close_to_bf16_and_new_token_counts_compile_nothing(
    compiled_kernels, recipe, checkpointing, compiled
):
    counter = CompileCounterWithBackend(BACKEND) if compiled else None
    fp8, bf16 = build(FP8MoE(recipe=recipe), checkpointing, counter), build(None, "none")
    names = ["out", "x", *(name for name, _ in bf16.named_parameters())]
    for number, num_tokens in enumerate(TOKENS):
        if number == SETTLED:
            compiled_kernels.clear()
            graphs = counter.frame_count if compiled else 0
        for name, actual, expected in zip(names, step(fp8, num_tokens), step(bf16, num_tokens), strict=True):
            assert actual.dtype == expected.dtype == torch.bfloat16
            # The router's gradient is an inner product a token: its noise averages out over many.
            min_db = MIN_SQNR_DB if num_tokens >= 48 or "router" not in name else MIN_SQNR_DB - 4
            assert sqnr_db(actual, expected) >= min_db, f"{name}, {num_tokens} tokens"
    assert compiled_kernels == []
    assert (counter.frame_count if compiled else 0) == graphs


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_weights_quantised_once_a_step_give_the_same_bits(checkpointing, compiled):
    results = []
    for cache in (True, False):
        model = build(FP8MoE(), checkpointing, BACKEND if compiled else None, cache)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        values = []
        for _ in range(3):
            for num_tokens in TOKENS[:3]:
                x = normal(1, num_tokens, DIM, seed=num_tokens, device=DEVICE, dtype=torch.bfloat16)
                out = model(x)
                out.float().square().mean().backward()
                values.append(out.detach())
            values += [p.grad.clone() for name, p in model.named_parameters() if ".experts." in name]
            optimizer.step()
            optimizer.zero_grad()
            clear_quantized_weights(model)
        results.append(values)
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
