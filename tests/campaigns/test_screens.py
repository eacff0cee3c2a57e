"""The comparison of UP-ViT's proxy scores with exact ones."""

import pytest
from screens import share_in_common

from vitcompress.plan import Plan


def test_proxy_scores_are_compared_by_removed_channels() -> None:
    exact, proxy = (Plan("any", kept={"a": kept, "b": (0,)}) for kept in ((0, 1), (1, 2)))
    assert share_in_common({"a": 4, "b": 2}, exact, proxy) == pytest.approx(2 / 3)
