"""How the operators are registered with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._library.custom_ops import get_library_allowing_overwrite


class Operator:
    """A function registered as ``torch.ops.titan_fp8moe.<name>`` for CPU and CUDA: opaque to compilers, no autograd.

    What ``torch.library.custom_op`` makes too, but that wraps each call in Python layers of its own: some 18 µs of host
    time, where this takes 4.

    Attributes:
        overload: the registered ``torch._ops.OpOverload``, e.g. for ``torch.library.opcheck``.
    """

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        name = function.__name__
        # What custom_op uses: the package can be imported afresh after its modules were dropped.
        self._library = get_library_allowing_overwrite("titan_fp8moe", name)
        self._library.define(
            name + torch.library.infer_schema(function, mutates_args=()),
            tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
        )
        for key in ("CPU", "CUDA"):
            self._library.impl(name, function, key)
        self.overload = getattr(torch.ops.titan_fp8moe, name).default

    def register_fake(self, function: Callable) -> Callable:
        """Decorator: what the operator returns for meta and fake tensors."""
        torch.library.register_fake(self.overload.name(), function, lib=self._library)
        return function

    def __call__(self, *args, **kwargs):
        if torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values())
        ):
            raise RuntimeError(
                f"{self.overload.name()} has no gradient, and an input requires one; detach it or use torch.no_grad(), "
                "or call float8_grouped_mm or float8_experts, which are differentiable"
            )
        return self.overload(*args, **kwargs)
