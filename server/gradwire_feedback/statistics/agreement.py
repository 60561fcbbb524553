"""Agreement of raters: Krippendorff's alpha for scores on an interval scale."""

from __future__ import annotations

import krippendorff
import numpy as np
from numpy.typing import NDArray


def agreement(table: NDArray[np.float64]) -> float | None:
    """Krippendorff's alpha: 1 for full agreement, 0 for chance; None if it is not defined.

    Args:
        table: [raters, answers], NaN where a rater did not score an answer.
    """
    shared = table[:, np.sum(~np.isnan(table), axis=0) > 1] if table.size else table
    values = shared[~np.isnan(shared)]
    if values.size < 2 or np.ptp(values) == 0.0:
        return None
    return float(krippendorff.alpha(reliability_data=shared, level_of_measurement="interval"))
