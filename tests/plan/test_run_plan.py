from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config
from dpipe.errors import CheckpointError, ConfigError
from dpipe.plan.run_plan import draft

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
    with pytest.raises(
        ConfigError, match="no layer of plain_layers:layers has one: set attention_core = True"
    ):
        draft(tiny(model__layers="plain_layers:layers", pipeline__recompute="selective"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no-such-protocol://bucket/run", "Protocol not known"),
        ("{}/text.txt/checkpoints", "text.txt is not a writable folder"),
    ],
)
def test_place_for_checkpoints_that_cannot_be_used_is_refused_before_the_run(
    url: str, message: str, tiny: Callable[..., Config], tmp_path: Path
) -> None:
    """Otherwise a run would train until its first checkpoint and then lose everything."""
    with pytest.raises(CheckpointError, match=message):
        draft(tiny(run__checkpoint_url=url.format(tmp_path)))


def test_tied_exchange_is_of_the_token_embedding_only(tiny: Callable[..., Config]) -> None:
    """Not of the position embedding, which is in the same layer."""
    config = tiny(model__tie_embeddings=True, pipeline__stages=2)
    measured, estimated = (
        draft(config, layer_s=seconds).forecast.cost for seconds in ((1.0,) * 4, None)
    )
    assert measured.tied_bytes == estimated.tied_bytes == 256 * config.model.width * 4


def test_memory_of_users_layers_is_their_own_and_not_that_of_a_transformer(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """model.width does not describe a user's own model."""
    (tmp_path / "wide_layers.py").write_text(WITHOUT_ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {
        "model__layers": "wide_layers:layers",
        "pipeline__stages": 2,
        "pipeline__schedule": "gpipe",
    }
    narrow, wide = (draft(tiny(**own, model__width=width)).forecast.memory for width in (16, 1024))
    assert narrow == wide


def test_users_layers_in_half_precision_have_master_weights(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_layers.py").write_text(WITHOUT_ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    half = {"train__precision": "bf16", "train__parameters": "bf16"}
    (rank,) = draft(tiny(model__layers="plain_layers:layers", **half)).forecast.memory
    values = 256 * 8 + 8 * 256 + 256
    assert (rank.parameters, rank.optimizer) == ((2 + 4) * values, 8 * values)
