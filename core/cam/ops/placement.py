"""Which rank has which expert."""


def expert_range(num_experts: int, size: int, rank: int) -> range:
    """The global experts on a rank: contiguous, the first num_experts % size ranks own one more."""
    each, more = divmod(num_experts, size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))
