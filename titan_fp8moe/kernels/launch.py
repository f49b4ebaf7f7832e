"""Launches, in little host time: Triton's own way takes more of it than the driver's, several times over."""

import triton

_compiled = {}


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; `triton.cdiv` takes microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, which is positive; so does `triton.next_power_of_2`."""
    return 1 << (n - 1).bit_length()


def _distinction(arg):
    """What of an argument Triton may compile for: at least all that it tells apart, and few values."""
    if type(arg) is int:
        return (arg == 1) + 2 * (arg % 16 == 0) + 4 * (arg >= 2**31)
    if arg is None:
        return None
    if hasattr(arg, "data_ptr"):
        return arg.dtype, arg.data_ptr() % 16 == 0
    # A descriptor. Its layout, which is cached by dtype and block and so never freed, tells it apart.
    return id(arg.layout)


def launch(kernel, grid, args, constants, **options):
    """``kernel[grid](*args, *constants, **options)``, which is done once for all launches that compile to the same.

    Args:
        kernel: a function of `triton.jit` or `gluon.jit`.
        grid: three numbers of programs.
        args: its parameters that are no ``constexpr``: tensors, None, integers of at least 0, or descriptors of
            `titan_fp8moe.kernels.ragged_descriptors`.
        constants: the values of its ``constexpr``, which come last.
        options: what Triton compiles it with, e.g. ``num_warps``.
    """
    if not isinstance(kernel, triton.JITFunction):
        # Triton's interpreter.
        kernel[grid](*args, *constants, **options)
        return
    device = triton.runtime.driver.active.get_current_device()
    key = (id(kernel), device, constants, *options.values(), *map(_distinction, args))
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*args, *constants, **options)
    else:
        compiled[grid](*args, *constants)
