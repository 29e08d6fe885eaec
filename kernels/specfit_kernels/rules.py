"""How scales are chosen, by name; without torch, so that a configuration can say it."""

from enum import Enum


class ScaleRule(Enum):
    """How the scale of an NVFP4 block is chosen."""

    amax = "amax"  # its largest size becomes 6, as in compressed-tensors and ModelOpt
    four_over_six = "four_over_six"  # becomes 6 or 4, whichever has the least squared error
    search = "search"  # of all E4M3 scales the one of least squared error
