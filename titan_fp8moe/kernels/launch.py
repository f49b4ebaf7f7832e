"""Integers of a launch: Triton's own functions of these names take microseconds a call on the host."""


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, which is positive."""
    return 1 << (n - 1).bit_length()
