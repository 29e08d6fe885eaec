"""Shares from counts that noise and a classifier's mistakes have moved."""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

MAX_CONDITION = 100.0  # beyond, errors of the counts come back a hundredfold
ROW_SLACK = 1e-6  # by which a row of a confusion matrix may miss a sum of 1


def project(values: Values) -> Values:
    """The point of the simplex (no entry below 0, sum 1) that is nearest to `values`, a vector.

    Source: Duchi et al. 2008, "Efficient projections onto the l1-ball", figure 1.
    """
    ordered = np.sort(values)[::-1]
    excess = (np.cumsum(ordered) - 1) / np.arange(1, len(values) + 1)
    threshold = excess[ordered > excess][-1]
    nearest: Values = np.maximum(values - threshold, 0.0)
    return nearest


def projected_counts(values: Values) -> Values:
    """`values` with their sum kept and none below 0; all 0 where the sum is not positive.

    What is only noise is taken down to 0, where clipping alone would leave its upper half.
    """
    total = float(values.sum())
    return total * project(values / total) if total > 0 else np.zeros_like(values)


def check_confusion(confusion: Values, components: list[str]) -> None:
    """Refuses a confusion matrix that cannot be undone.

    A nearly singular one is not regularized: what would come out for components that the
    classifier cannot tell apart is an assumption, not an estimate.

    Args:
        confusion: P(predicted j | true i) at [i, j].
        components: their names, in its order.

    Raises:
        ValueError: it is not square, its rows are no distributions, or it is nearly singular; then
            the message names the two components that it tells apart least.
    """
    n = len(components)
    if confusion.shape != (n, n):
        raise ValueError(f"confusion must be {n} by {n}, got {confusion.shape}")
    sums = np.abs(confusion.sum(1) - 1)
    if not (np.isfinite(confusion).all() and (confusion >= 0).all() and (sums <= ROW_SLACK).all()):
        raise ValueError(f"confusion must have rows that sum to 1, got {confusion.tolist()}")
    condition = float(np.linalg.cond(confusion))
    if not condition <= MAX_CONDITION:
        apart = np.abs(confusion[:, None] - confusion[None]).sum(2) + 3 * np.eye(n)
        i, j = np.unravel_index(int(apart.argmin()), apart.shape)
        raise ValueError(
            f"confusion must have a condition number of at most {MAX_CONDITION:g}, got "
            f"{condition:.3g}; the classifier does not tell {components[i]} from {components[j]}: "
            "make them one component"
        )


def unmixed(confusion: Values, counts: Values) -> Values:
    """Counts by true component, from counts by predicted component (the first axis).

    counts = confusionᵀ · true, so the sum stays; noise may leave entries below 0. Further axes
    (lengths, say) are undone at each index alone: mistakes must not depend on them. `confusion` is
    one that `check_confusion` passes.
    """
    flat = np.linalg.solve(confusion.T, counts.reshape(len(confusion), -1))
    return flat.reshape(counts.shape).astype(np.float64)
