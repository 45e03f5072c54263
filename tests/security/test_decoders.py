"""No input makes a decoder raise an undeclared error, hang, or crash."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Verbosity, given, settings
from hypothesis import strategies as st
from security.decoders import DECODERS, OWN, Decoder, broken, complaint_of

import dpipe
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS, Format
from dpipe.wire.spec import TensorSpec

EXAMPLES = [40, pytest.param(120, marks=pytest.mark.slow)]  # of each decoder
# Functions that turn bytes into values.
PARSERS = {
    "json.loads",
    "tomllib.loads",
    "parse_toml",
    "safe_open",
    "torch.frombuffer",
    "np.memmap",
    "np.frombuffer",
    "unpack_from",
    "AutoConfig.from_pretrained",
    "AutoTokenizer.from_pretrained",
    "GGUFReader",
    "FromString",
    "validate_json",
    "SPEC.read",
    "_STATE.read",
}


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_decoder_accepts_its_examples(decoder: Decoder) -> None:
    for seed in decoder.seeds():
        try:
            decoder.decode(seed)
        except decoder.allowed:
            assert decoder.name == "greeting of a transport", "strangers have no token"


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)
def test_broken_input_is_refused_with_the_rooms_own_error(decoder: Decoder, examples: int) -> None:
    @settings(
        max_examples=max(2, examples // decoder.share),
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,  # an input may have thousands of characters
    )
    @given(data=broken(decoder))
    def attack(data: bytes) -> None:
        complaint = complaint_of(decoder, data)
        assert complaint is None, f"{complaint} at {data!r:.300}"

    attack()


# Of 8 bits and more; `tests/wire` has the bounds of the others.
_NEAR = [form for form in FORMATS.values() if form.codec.startswith("dpipe.wire.codec:")]


@pytest.mark.parametrize("form", _NEAR, ids=lambda form: form.name)
@given(values=st.lists(st.floats(-60_000, 60_000, width=32), min_size=1, max_size=600))
def test_decoded_values_are_near_the_encoded_ones(form: Format, values: list[float]) -> None:
    """The bound that every format keeps; `wire/codec.py` has that of each."""
    sent = torch.tensor(values)
    used = codec(form.name)
    wire = used.encode(sent)
    assert TensorSpec.of(wire) == used.wire_spec(TensorSpec.of(sent))
    error = (used.decode(wire, TensorSpec.of(sent)) - sent).abs().max()
    most = sent.abs().max() / 250 + 1e-7
    assert float(error) <= (float(most) if form.lossy else 0.0)


def test_names_of_decoders_are_unique() -> None:
    names = [decoder.name for decoder in DECODERS]
    assert len(set(names)) == len(names)


def parsing_functions() -> Iterator[str]:
    """ "module:function" for each function of dpipe that calls one of `PARSERS`."""
    root = Path(dpipe.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if "v1" in path.parts:
            continue
        module = ".".join(("dpipe", *path.relative_to(root).with_suffix("").parts))
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and calls_parser(function):
                yield f"{module}:{function.name}"


def calls_parser(function: ast.FunctionDef) -> bool:
    last_names = {parser.rpartition(".")[2] for parser in PARSERS}
    for node in ast.walk(function):
        if not isinstance(node, ast.Call):
            continue
        # To unparse every call would take seconds.
        if getattr(node.func, "attr", getattr(node.func, "id", "")) in last_names:
            called = ast.unparse(node.func)
            if called in PARSERS or called.rpartition(".")[2] in PARSERS:
                return True
    return False


def test_every_function_that_parses_is_fuzzed() -> None:
    fuzzed = {name for decoder in DECODERS for name in decoder.covers}
    parsing = set(parsing_functions())
    missing = parsing - fuzzed - set(OWN)
    assert not missing, f"add to tests/security/decoders.py: {sorted(missing)}"
    gone = (fuzzed | set(OWN)) - parsing
    assert not gone, f"these parse nothing: {sorted(gone)}"
