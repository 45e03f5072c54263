"""A base in 8 or 4 bits, and the adapter that learns beside it."""

import pytest
import torch
from hub.test_hub_truth import stages_of, train_once
from torch import nn

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import first_inputs, make_model, stage_runner
from dpipe.probe.layer_costs import probe
from dpipe.probe.measured import measured_stages
from dpipe.quantised.layers import quantised
from dpipe.quantised.linear import QuantisedLinear
from dpipe.quantised.matrix import _LEVELS, QuantisedMatrix
from dpipe.stage.model import materialise

# peft asks transformers by a name that transformers will drop.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:The following \w+_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
]
published = pytest.importorskip("hub.published")
MIXTURES = ("qwen3-moe", "mixtral")
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}


def rounded(kind, rows=24, columns=128, bias=True):
    """A linear layer, and the same in that many bits."""
    torch.manual_seed(3)
    linear = nn.Linear(columns, rows, bias=bias)
    made = QuantisedLinear(linear, kind)
    made.take(linear.weight.detach())
    return linear, made


def config_of(folder, base, **tables):
    table = {
        "model": {"hf": str(folder), "context": 11},
        "adapter": {"kind": "lora", "r": 4, "base": base},
        "train": {"num_microbatches": 1, "batch_size": 2},
    }
    return build(table | tables)


def test_int8_is_the_nearest_of_255_values_a_row():
    linear, made = rounded("int8")
    largest = linear.weight.abs().amax(1, keepdim=True)
    assert made.codes.dtype is torch.int8 and int(made.codes.abs().max()) == 127
    assert ((made.weight - linear.weight).abs() <= largest / 254 * 1.001).all()


@pytest.mark.parametrize("columns", [128, 96, 6])
def test_nf4_is_the_nearest_level_of_its_block(columns):
    """A block is 64 values of a row, or fewer where its length is no multiple."""
    linear, made = rounded("nf4", columns=columns)
    assert made.codes.shape == (24, columns // 2) and made.codes.dtype is torch.uint8
    width = {128: 64, 96: 32, 6: 2}[columns]
    blocks = linear.weight.detach().unflatten(1, (-1, width))
    largest = blocks.abs().amax(-1, keepdim=True)
    levels = torch.tensor(_LEVELS) * largest[..., None]
    nearest = (blocks[..., None] - levels).abs().amin(-1)
    error = (made.weight.unflatten(1, (-1, width)) - blocks).abs()
    torch.testing.assert_close(error, nearest, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("bias", [False, True])
def test_product_and_gradient_are_those_of_the_matrix(kind, bias):
    linear, made = rounded(kind, bias=bias)
    x = torch.randn(2, 5, 128, requires_grad=True)
    twin = x.detach().clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        made(x).square().sum().backward()
    nn.functional.linear(twin, made.weight, linear.bias).square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    # No matrix waits for the backward pass.
    assert torch.Size([24, 128]) not in kept and kept
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype is torch.bfloat16


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_adapter_learns_alike_in_every_cut_beside_a_base_of_few_bits(base, tmp_path):
    folder = published.save("smollm2", tmp_path / "model")
    tokens = published.tokens()
    model = make_model(config_of(folder, base))
    losses = []
    for cut in ((6,), (2, 4), (1, 2, 1, 2)):
        stages = stages_of(model, cut)
        losses.append(train_once(stages, (tokens[:, :-1],), tokens[:, 1:]).item())
        gradients = [p.grad for stage in stages for p in stage.parameters()]
        assert len(gradients) == 4 * 7 * 2
        assert any(each.abs().sum() > 0 for each in gradients)
    assert len(set(losses)) == 1
    full = stages_of(make_model(config_of(folder, "full")), (6,))
    exact = train_once(full, (tokens[:, :-1],), tokens[:, 1:]).item()
    assert exact != losses[0] == pytest.approx(exact, rel={"int8": 0.01, "nf4": 0.1}[base])


@pytest.mark.slow
def test_bytes_of_a_base_of_few_bits_are_predicted(tmp_path):
    folder = published.save("llama", tmp_path / "model", hidden_size=256, intermediate_size=512)
    held = {}
    for base in ("full", "int8", "nf4"):
        config = config_of(folder, base)
        model = make_model(config)
        probed = probe(model, first_inputs(config), 0)
        (stage,) = measured_stages(stage_runner(config, model), probed, (6,))
        frozen = 0
        for index in range(6):
            layer = materialise(model, index, 0, "cpu")
            frozen += sum(buffer.nbytes for _, buffer in layer.named_buffers())
        assert sum(layer.frozen_bytes for layer in stage) == frozen
        held[base] = frozen
    assert held["int8"] < 0.31 * held["full"] and held["nf4"] < 0.2 * held["full"]


def test_model_that_would_hardly_shrink_is_refused(tmp_path):
    folder = published.save("gpt2", tmp_path / "model")  # its matrices are in no linear layer
    with pytest.raises(ConfigError, match="most of a block of 'gpt2' is neither"):
        make_model(config_of(folder, "int8"))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_stack_is_coded_as_each_of_its_matrices(kind):
    torch.manual_seed(3)
    stack = torch.randn(4, 24, 128)
    made = QuantisedMatrix(stack, kind)
    made.take(stack)
    for number, matrix in enumerate(stack):
        alone = QuantisedMatrix(matrix, kind)
        alone.take(matrix)
        assert torch.equal(made.matrix(torch.float32)[number], alone.matrix(torch.float32))


def layer_of(folder, base, **adapter):
    config = config_of(folder, base)
    changes = {f"adapter__{key}": value for key, value in adapter.items()}
    return materialise(make_model(config.with_(**changes)), 1, 0, "cpu")


@pytest.mark.parametrize("adapter", [{}, ATTENTION], ids=["all-linear", "attention"])
@pytest.mark.parametrize("base", ["int8", "nf4"])
@pytest.mark.parametrize("family", MIXTURES)
def test_mixture_computes_with_the_matrices_that_its_codes_make(family, base, adapter, tmp_path):
    """The same output and gradients as a layer that has those matrices, to the bit."""
    folder = published.save(family, tmp_path / "model")
    layer = layer_of(folder, base, **adapter)
    twin = layer_of(folder, "full", **adapter)
    twin.load_state_dict(layer.state_dict())
    stacks = dict(quantised(layer))
    assert sum("experts" in name for name in stacks) == 2
    with torch.no_grad():
        for name, codes in stacks.items():
            owner, _, key = name.rpartition(".")
            twin.get_submodule(owner)._buffers[key].copy_(codes.matrix(codes.dtype))
        for parameters in (layer.parameters(), twin.parameters()):
            torch.manual_seed(5)
            for parameter in parameters:
                parameter += 0.1 * torch.randn_like(parameter)
    found = []
    for each in (layer, twin):
        x = torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32).requires_grad_()
        each(x).square().sum().backward()
        learned = [parameter.grad for parameter in each.parameters()]
        found.append([x.grad, *learned])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert any(gradient.abs().sum() > 0 for gradient in found[0][1:])


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_graph_keeps_no_stack_and_all_else(implementation, tmp_path):
    layer = layer_of(published.save("mixtral", tmp_path / "model"), "nf4", **ATTENTION)
    twin = layer_of(tmp_path / "model", "full", **ATTENTION)
    kept = []
    for each in (layer, twin):
        each.block.mlp.experts.config._experts_implementation = implementation
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tuple(tensor.shape))
            return tensor

        torch.manual_seed(5)
        x = torch.randn(2, 5, 32, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            each(x).sum().backward()
        kept.append(sizes)
    matrices = set()
    for _, codes in quantised(layer):
        for size in (tuple(codes.shape), tuple(codes.shape)[-2:]):
            matrices |= {size, (*size[:-2], size[-1], size[-2])}
    of_codes, of_full = ([size for size in sizes if size not in matrices] for sizes in kept)
    assert of_codes == of_full
    assert not matrices & set(kept[0])
    assert matrices & set(kept[1])


def test_base_of_few_bits_without_an_adapter_is_refused():
    with pytest.raises(ConfigError, match=r'adapter.base "nf4" quantises what does not learn'):
        build({"model": {"hf": "a/b"}, "adapter": {"base": "nf4"}})
