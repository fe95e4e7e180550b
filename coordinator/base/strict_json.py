"""Numbers that JSON cannot represent. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def replace_non_finite(value: Any) -> Any:
    """Return the value with null for NaN and infinities, which strict JSON lacks; keys of its tables become strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(each) for each in value]
    return value
