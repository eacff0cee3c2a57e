"""The example in recipes/examples/my_family.py: what a family outside of vitcompress may use."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contracts import assert_moved, assert_same, logits, sites_of
from torch import nn

import vitcompress as vc
from vitcompress.families import FAMILIES

EXAMPLE = Path(__file__).parents[2] / "recipes" / "examples" / "my_family.py"
ARCH = "cait_xxs24_224"
ARGS = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "depth_token_only": 1}
X = torch.randn(3, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "cait", runpy.run_path(str(EXAMPLE))["CAIT"])


def model(create: Callable[..., nn.Module] = vc.create_model, **changes: Any) -> nn.Module:
    """A CaiT with random values in all parameters."""
    created = create(ARCH, **{**ARGS, "num_classes": 5, **changes}).double().eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in created.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return created


def test_attentions_and_activations_are_removed_and_folded(tmp_path: Path) -> None:
    dense = model()
    sites = [site.name for kind in ("attention", "activation") for site in sites_of(dense, kind)]
    plan = dense.plan.delta(removed={sites[0]: "drop", sites[2]: "identity"})
    small = vc.prune(dense, plan)
    assert_moved(logits(small, X), logits(dense, X))
    folded = vc.fold(small)
    assert_same(logits(folded, X), logits(small, X))
    vc.save_model(folded, tmp_path / "run")
    assert_same(logits(vc.load_model(tmp_path / "run"), X), logits(folded, X))
