"""Seeds of the completions of one call."""

UINT64 = (1 << 64) - 1  # mask


def choice_seed(seed: int, choice: int) -> int:
    """Seed of completion `choice` of a call: the call's own for the first, then the output of SplitMix64 (Steele, Lea
    and Flood 2014) after `choice` steps. uint64."""
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64
    return z ^ (z >> 31)
