import subprocess
import sys

import pytest
import torch

from dpipe.probe.layer_costs import probe
from dpipe.stage.bert import bert
from dpipe.stage.flops import (
    attention_core_flops,
    bert_layer_flops,
    bert_layer_parameter_bytes,
    gpt_layer_flops,
    gpt_layer_parameter_bytes,
)
from dpipe.stage.gpt import gpt
from dpipe.wire.spec import TensorSpec

SIZES = {"vocab_size": 96, "num_layers": 2, "width": 64, "context": 32}
BATCH = 4
IDS = TensorSpec((BATCH, 32), torch.int64)
MODEL = gpt(**SIZES, num_heads=4, dropout=0.0, tied=False)


def test_formula_counts_what_torch_counts() -> None:
    counted = [cost.forward_flops for cost in probe(MODEL, [IDS], seed=0)]
    assert list(gpt_layer_flops(batch_size=BATCH, **SIZES)) == counted


def test_attention_core_is_what_torch_counts_in_it() -> None:
    counted = [cost.core_flops for cost in probe(MODEL, [IDS], seed=0)]
    core = attention_core_flops(batch_size=BATCH, context=SIZES["context"], width=SIZES["width"])
    assert counted == [0.0, core, core, 0.0]


@pytest.mark.parametrize("tied", [False, True])
def test_formula_counts_the_parameters(tied: bool) -> None:
    model = gpt(**SIZES, num_heads=4, dropout=0.0, tied=tied)
    counted = [cost.parameter_bytes for cost in probe(model, [IDS], seed=0)]
    assert list(gpt_layer_parameter_bytes(**SIZES)) == counted


def test_formulas_of_bert_count_what_torch_counts() -> None:
    model = bert(**SIZES, num_heads=4, dropout=0.0, tied=True)
    counted = probe(model, [IDS, IDS, TensorSpec((BATCH,), torch.int32)], seed=0)
    assert list(bert_layer_flops(batch_size=BATCH, **SIZES)) == [
        cost.forward_flops for cost in counted
    ]
    assert list(bert_layer_parameter_bytes(**SIZES)) == [cost.parameter_bytes for cost in counted]


@pytest.mark.parametrize("module", ["stage.flops", "plan.partition"])
def test_module_needs_no_torch(module: str) -> None:
    code = f"import sys, dpipe.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
