import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpipe.errors import ConfigError
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel, load_layers, materialise

SIZES = {
    "vocab_size": 11,
    "num_layers": 2,
    "width": 8,
    "num_heads": 2,
    "context": 4,
    "dropout": 0.0,
}


def weights(model: LayeredModel, index: int, seed: int = 0) -> torch.Tensor:
    return nn.utils.parameters_to_vector(materialise(model, index, seed, "cpu").parameters())


def test_layer_is_the_same_whatever_was_made_before() -> None:
    model = gpt(**SIZES, tied=False)
    alone = weights(model, 2)
    for index in (0, 1):
        weights(model, index)
    assert torch.equal(weights(model, 2), alone)


def test_layers_of_one_kind_start_differently() -> None:
    model = gpt(**SIZES, tied=False)
    assert not torch.equal(weights(model, 1), weights(model, 2))
    assert not torch.equal(weights(model, 1), weights(model, 1, seed=1))


def test_making_a_layer_leaves_the_generator_of_the_caller() -> None:
    state = torch.get_rng_state()
    weights(gpt(**SIZES, tied=True), 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_tied_weights_are_two_parameters_of_equal_start() -> None:
    model = gpt(**SIZES, tied=True)
    first, last = (materialise(model, index, 0, "cpu") for index in (0, 3))
    assert model.tied == ("tokens.weight", "output.weight")
    assert torch.equal(first.tokens.weight, last.output.weight)
    assert first.tokens.weight is not last.output.weight


USERS_MODULE = """
import torch
from torch import nn

def layers(width=4, count=2):
    return [nn.Linear(width, width) for _ in range(count)], nn.functional.mse_loss

def lazy(width=4):
    return [lambda: nn.Linear(width, width), nn.Identity], nn.functional.mse_loss

def one(): return nn.Linear(1, 1)
def empty(): return [], nn.functional.mse_loss
def fails(): return {}["no such\\nkey"]
def fails_late(): return (1 / 0 for _ in range(3)), nn.functional.mse_loss
def words(): return ["linear"], nn.functional.mse_loss
def shared():
    one = nn.Linear(4, 4)
    return [one, nn.Sequential(nn.ReLU(), one)], nn.functional.mse_loss
def numbers(): return [lambda: 3], nn.functional.mse_loss
constant = 3
"""


@pytest.fixture
def users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A working folder with a user's module. Its name is unique, because modules are imported
    once.
    """
    name = f"users_model_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USERS_MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / f"{name}_syntax.py").write_text("def layers(:\n")
    (tmp_path / f"{name}_raises.py").write_text("\nwidth = int('wide')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    return name


def test_users_layers_come_from_the_working_folder(users_folder: str) -> None:
    model = load_layers(f"{users_folder}:layers", {"count": 3}, seed=0)
    assert len(model.layers) == 3
    assert model.loss is nn.functional.mse_loss


def test_users_layers_are_a_function_of_the_seed(users_folder: str) -> None:
    first, again, other = (load_layers(f"{users_folder}:layers", {}, seed) for seed in (0, 0, 1))
    assert torch.equal(weights(first, 0), weights(again, 0))
    assert not torch.equal(weights(first, 0), weights(other, 0))


def test_users_modules_are_copied_for_each_rank(users_folder: str) -> None:
    model = load_layers(f"{users_folder}:layers", {}, seed=0)
    one, two = (materialise(model, 0, 0, "cpu") for _ in range(2))
    assert one.weight is not two.weight


def test_users_functions_make_layers_when_asked(users_folder: str) -> None:
    model = load_layers(f"{users_folder}:lazy", {"width": 5}, seed=0)
    assert materialise(model, 0, 0, "cpu").weight.shape == (5, 5)
    assert isinstance(materialise(model, 1, 0, "cpu"), nn.Identity)


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("no_such_module:layers", {}, "cannot import 'no_such_module'"),
        ("{}_broken:layers", {}, "no_such_package_anywhere"),
        (
            "{}_syntax:layers",
            {},
            r"cannot import '\w+_syntax': SyntaxError: invalid syntax \(\w+_syntax.py, line 1\)$",
        ),
        (
            "{}_raises:layers",
            {},
            r"cannot import '\w+': ValueError: .* \(at .*_raises.py, line 2\)$",
        ),
        ("{}:fails", {}, r"fails raised KeyError: 'no such\\nkey' \(at .*, line 13\)$"),
        ("{}:fails_late", {}, r"fails_late raised ZeroDivisionError: division by zero"),
        ("{}:no_such", {}, "has no function 'no_such'"),
        ("{}:constant", {}, "has no function 'constant'"),
        ("{}:layers", {"depth": 3}, "model.options do not fit .*'depth'"),
        ("{}:one", {}, r"must return \(list of layers, loss function\)"),
        ("{}:empty", {}, "returned no layers"),
        ("{}:shared", {}, r"layers\.0\.weight and layers\.1\.1\.weight are one parameter"),
        ("{}:words", {}, "layer 0 must be an nn.Module"),
    ],
)
def test_users_mistake_is_named(
    users_folder: str, function: str, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_layers(function.format(users_folder), options, seed=0)


def test_users_function_that_makes_no_module_is_named(users_folder: str) -> None:
    model = load_layers(f"{users_folder}:numbers", {}, seed=0)
    with pytest.raises(ConfigError, match="layer 0 makes 3, not an"):
        materialise(model, 0, 0, "cpu")
