"""Few sizes for what is recorded: a CUDA graph is made for one shape, so there should be few."""


def power_of_two(count: int) -> int:
    """The next of 1, 2, 4, 8, ..."""
    return 1 << (count - 1).bit_length()


def in_steps(count: int, unit: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... units: at most half more than `count`, beyond
    the first unit.

    With a unit of 128, 300 are 384 and 1300 are 1536.
    """
    units = -(-count // unit)
    doubled = power_of_two(units)
    between = doubled * 3 // 4
    return unit * (between if between >= units else doubled)
