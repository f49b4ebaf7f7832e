"""FP8 grouped GEMMs: ours, torch's FP8 and bf16 ones, and a dense FP8 product of the same size in the same run.

    python scripts/bench_grouped_mm.py [--shapes scout maverick deepseek_v3] [--tokens 1024 ... 131072] [--rounds 8]

Forward is (T, D) x (E, D, H), dgrad (T, H) x (E, H, D), wgrad (H, T) x (T, D). In "wgrad, padded" our operands have
each group at a multiple of 128 tokens, zeros between, as both public functions make them; the others' are as in
"wgrad". Numerics are checked before anything is timed: equal to torch's FP8 kernel bit for bit. Long products are
power-bound, so variants run in bursts whose order changes from round to round.
Writes scripts/results/grouped_mm.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import benchlib
import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.float8 import padded_tokens

SHAPES = {  # dim, hidden_dim, experts
    "scout": (5120, 8192, 16),
    "maverick": (5120, 8192, 128),
    "deepseek_v3": (7168, 2048, 32),
}
TOKENS = (1024, 4096, 16384, 65536, 131072)
DIRECTIONS = ("forward", "dgrad", "wgrad", "wgrad, padded")


def aligned_offs(tokens: int, num_experts: int, routing: str) -> Tensor:
    """End offsets, groups in multiples of 16 tokens, as torch's kernels want them."""
    ends = torch.tensor(benchlib.group_sizes(tokens, num_experts, routing)).cumsum(0) // 16 * 16
    ends[-1] = tokens
    return ends.to("cuda", torch.int32)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def per_expert(make: Callable[[], Tensor], num_experts: int) -> Tensor:
    # One expert at a time: the bf16 weights of 128 experts would not fit beside everything else.
    return torch.cat([make() for _ in range(num_experts)])


def rowwise_products(tokens: int, k: int, n: int, offs: Tensor) -> tuple[dict, Tensor]:
    """Functions of the 2d-3d product, and its float32 result for the last rows."""
    num_experts = offs.shape[0]
    a, scale_a = ops.quantize_rowwise(normal(tokens, k))
    weights, scales = zip(*(ops.quantize_weight_colwise(normal(1, k, n)) for _ in range(num_experts)), strict=True)
    b_t = torch.cat([w.transpose(1, 2) for w in weights]).transpose(1, 2)
    scale_b = torch.cat(scales)
    del weights, scales
    a16, b16 = normal(tokens, k), per_expert(lambda: normal(1, n, k), num_experts).transpose(1, 2)
    functions = products(a, b_t, scale_a, scale_b, offs)
    functions["bf16"] = lambda: torch._grouped_mm(a16, b16, offs=offs)
    functions["dense"] = lambda: torch._scaled_mm(
        a, b_t[0], scale_a=scale_a[:, None], scale_b=scale_b[:1], out_dtype=torch.bfloat16, use_fast_accum=True
    )
    rows = min(64, tokens - int(offs[-2]))
    return functions, a[-rows:].float() @ b_t[-1].float() * scale_a[-rows:, None] * scale_b[-1]


def pad_groups(x: Tensor, offs: Tensor) -> Tensor:
    """Groups of columns of ``x (N, T)`` moved to where `ops.padded_offs` has them, zeros between."""
    num_columns = padded_tokens(x.shape[1], offs.shape[0])
    padded = torch.zeros(x.shape[0], num_columns, device="cuda", dtype=torch.uint8)
    start = padded_start = 0
    for end, padded_end in zip(offs.tolist(), ops.padded_offs(offs).tolist(), strict=True):
        padded[:, padded_start : padded_start + end - start] = x[:, start:end].view(torch.uint8)
        start, padded_start = end, padded_end
    return padded.view(x.dtype)


def wgrad_products(tokens: int, n: int, k: int, offs: Tensor, padded: bool) -> tuple[dict, Tensor]:
    """Functions of the 2d-2d product, and its float32 result for the last rows of the last group."""
    grad, x = normal(tokens, n), normal(tokens, k)
    a, scale_a = ops.quantize_rowwise_per_group(grad.t(), offs)
    b_t, scale_b = ops.quantize_colwise_per_group(x, offs)
    dense_a, dense_scale_a = ops.quantize_rowwise(normal(tokens, k))
    dense_b, dense_scale_b = ops.quantize_rowwise(normal(n, k))
    functions = products(a, b_t, scale_a, scale_b, offs)
    if padded:
        a_padded, b_padded, ends = pad_groups(a, offs), pad_groups(b_t.t(), offs).t(), ops.padded_offs(offs)
        functions["ours"] = lambda: ops.scaled_grouped_mm(a_padded, b_padded, scale_a, scale_b, ends, torch.bfloat16)
    functions["bf16"] = lambda: torch._grouped_mm(grad.t(), x, offs=offs)
    functions["dense"] = lambda: torch._scaled_mm(
        dense_a,
        dense_b.t(),
        scale_a=dense_scale_a[:, None],
        scale_b=dense_scale_b[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    start = int(offs[-2])
    return functions, a[-64:, start:].float() @ b_t[start:].float() * scale_a[-1, -64:, None] * scale_b[-1]


def products(a: Tensor, b_t: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> dict:
    torch_scales = (scale_a.view(-1), scale_b if b_t.dim() == 3 else scale_b.view(-1))
    return {
        "ours": lambda: ops.scaled_grouped_mm(a, b_t, scale_a, scale_b, offs, torch.bfloat16),
        "torch": lambda: torch._scaled_grouped_mm(
            a, b_t, *torch_scales, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=True
        ),
    }


def check_numerics(functions: dict, expected: Tensor, what: str) -> None:
    ours = functions["ours"]()
    if not torch.equal(ours, functions["torch"]()):
        raise SystemExit(f"{what}: not the bits of torch._scaled_grouped_mm")
    got = ours.flatten(0, -2)[-expected.shape[0] :].float()
    error = ((got - expected).norm(dim=0) / expected.norm(dim=0)).max().item()
    if not error < 0.02:
        raise SystemExit(f"{what}: a column's error against float32 is {error:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(0)
    rows = []
    for shape in args.shapes:
        dim, hidden_dim, num_experts = SHAPES[shape]
        for tokens in args.tokens:
            for routing in ("uniform", "skewed"):
                offs = aligned_offs(tokens, num_experts, routing)
                for direction in args.directions:
                    if direction.startswith("wgrad"):
                        padded = direction.endswith("padded")
                        functions, expected = wgrad_products(tokens, hidden_dim, dim, offs, padded)
                    else:
                        k, n = (dim, hidden_dim) if direction == "forward" else (hidden_dim, dim)
                        functions, expected = rowwise_products(tokens, k, n, offs)
                    check_numerics(functions, expected, f"{shape} {tokens} {routing} {direction}")
                    flops = 2 * tokens * dim * hidden_dim
                    tflops = {
                        name: flops / milliseconds / 1e9
                        for name, milliseconds in benchlib.interleaved_ms(functions, args.rounds).items()
                    }
                    row = {"shape": shape, "T": tokens, "routing": routing, "direction": direction}
                    row |= {f"{name}_tflops": round(value, 1) for name, value in tflops.items()}
                    row |= {
                        f"ours/{name}": round(tflops["ours"] / tflops[name], 3) for name in tflops if name != "ours"
                    }
                    rows.append(row)
                    print(row, flush=True)
                    benchlib.write_csv("grouped_mm.csv", rows)
                    del functions, expected
    print()
    benchlib.print_table(rows, list(rows[0]))


if __name__ == "__main__":
    main()
