from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config import Config
from dpipe.engine.blueprint import draft
from dpipe.errors import ConfigError

WITHOUT_ATTENTION = """
from torch import nn
def layers():
    return [nn.Embedding(256, 8), nn.Linear(8, 256)], lambda logits, targets: logits.mean()
"""


def test_selective_recomputation_of_a_model_without_attention_is_refused(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_layers.py").write_text(WITHOUT_ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="no layer of plain_layers:layers has one: set attention_core = True"):
        draft(tiny(model__layers="plain_layers:layers", pipeline__recompute="selective"))
