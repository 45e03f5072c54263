"""`DECODERS`: every decoder of external input. Hypothesis feeds each of them broken inputs, for a
minute in `test_decoders.py` and an hour in `scripts/fuzz`.

To add one: a `Decoder` with its name, a function of bytes, the errors that it may raise, inputs
that it accepts, and the product's functions that it goes through. `test_decoders.py` fails for a
function of dpipe that parses and is in nobody's `covers`.
"""

import json
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from fleet.hosts import HostsError, load_hosts
from google.protobuf.message import DecodeError, Message
from hypothesis import strategies as st
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers

from dpipe.agent.inquiry import STATUS
from dpipe.config.load import build, load
from dpipe.coordinator import frame, limits, membership, shared
from dpipe.data import rows
from dpipe.data.corpus import prepare
from dpipe.data.samples import mapped
from dpipe.data.stream import marks_in
from dpipe.elastic.agents import Epoch
from dpipe.elastic.journal import NAME as JOURNAL
from dpipe.elastic.journal import RunJournal
from dpipe.elastic.messages import FROM_AGENT, JOB_OFFER, LEAVE_REQUEST, STATUS_REQUEST, TO_AGENT
from dpipe.elastic.servers import SERVER_MOVED, SERVERS_KNOWN
from dpipe.engine.ballot import BALLOT, SCORES
from dpipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ProfileError,
    ScheduleError,
    TransferError,
)
from dpipe.hub.index import read_index
from dpipe.keeper.copies import PieceCopy, pack, unpack
from dpipe.keeper.messages import ANSWER, REQUEST
from dpipe.machines.file import dump_machines, load_machines, parse_machines
from dpipe.machines.hosts import load_hosts_network
from dpipe.measure import notes, reports
from dpipe.network.profile import load_network
from dpipe.paramserver import journal, messages
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.planner.plan_file import load_plan, plan_of_rank_0
from dpipe.probe.launcher_costs import from_text as layer_costs
from dpipe.processes.notice import aws_notice, azure_notice
from dpipe.report.metrics import keep_rows_before, read_rows
from dpipe.report.trace import (
    StepSpans,
    TraceInputs,
    dump_steps,
    load_inputs,
    load_steps,
    save_inputs,
)
from dpipe.schedule.action import parse_action
from dpipe.schedule.exchange import direct
from dpipe.schedule.generate import generate
from dpipe.schedule.lower import lower
from dpipe.schedule.text import from_csv, to_csv
from dpipe.serve.standalone import FolderSnapshots
from dpipe.session import greeting, grpc_stream
from dpipe.session.frames import ByteFrames
from dpipe.session.session import LinkSession
from dpipe.session.stream import SocketStream
from dpipe.store import checkpoint, identity
from dpipe.store.checkpoint_part import PART
from dpipe.store.run_folder import load_configuration
from dpipe.terms import copying
from dpipe.terms.storing import TermStore
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.span import Lane, Span
from dpipe.tokenizer.tokenizer import ByteTokenizer, FileTokenizer
from dpipe.toml import parse_toml
from dpipe.watch import points
from dpipe.watch.folder import log_line, measured_picture
from dpipe.watch.picture import as_json, as_table
from dpipe.wire import message
from dpipe.wire.codec import codec
from dpipe.wire.format import FORMATS
from dpipe.wire.schema import NCCL_OFFER, Schema
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1 import coordinator_pb2, parameters_pb2
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

Errors = tuple[type[Exception], ...]

MAX_CHARACTERS = 10_000  # of a message: some list every mistake


@dataclass(frozen=True)
class Decoder:
    name: str
    decode: Callable[[bytes], object]
    allowed: Errors  # that `decode` may raise; nothing else
    seeds: Callable[[], Sequence[bytes]]  # inputs that it accepts
    covers: tuple[str, ...] = ()  # "module:function" of dpipe that parses
    share: int = 1  # of the examples one in so many: it takes that much longer


def complaint_of(decoder: Decoder, data: bytes) -> str | None:
    """What is wrong with how `decoder` takes `data`; None where it takes or refuses it well."""
    try:
        decoder.decode(data)
    except decoder.allowed as error:
        if not str(error) and not isinstance(error, TimeoutError):
            return f"{type(error).__name__} without a word"
        if len(str(error)) > MAX_CHARACTERS:
            return f"{len(str(error))} characters of a message"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None


# Making broken inputs

_ODD_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 2**53, 0, 1e300, float("nan"), float("inf")])
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/dev/zero", "\ud800", "\0", "\x1b[2J", "1F0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
_PIECES = st.binary(max_size=16) | st.sampled_from(
    [b"\0", b"\xff" * 10, b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"-1", b"1e999", b"a." * 5000]
)


@st.composite
def broken(draw: st.DrawFn, decoder: Decoder) -> bytes:
    """An input of `decoder`, whole or with a few edits; or no input at all."""
    if draw(st.integers(0, 15)) == 0:
        return draw(st.binary(max_size=200))
    data = draw(st.sampled_from(list(decoder.seeds())))
    table = _as_json(data)
    if isinstance(table, dict | list) and draw(st.booleans()):
        return draw(_broken_json(table))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 8)))
        data = data[:start] + draw(_PIECES) + data[end:]
    return data


def _as_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


@st.composite
def _broken_json(draw: st.DrawFn, table: Any) -> bytes:
    """`table`, in which a few values are replaced, removed or renamed."""
    for _ in range(draw(st.integers(1, 3))):
        every = _places(table)
        if not every:
            break
        container, key = draw(st.sampled_from(every))
        how = draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace":
            container[key] = draw(_ODD_JSON)
        elif isinstance(container, dict):
            value = container.pop(key)
            if how == "rename":
                container[draw(st.text(max_size=8))] = value
        else:
            del container[key]
    return json.dumps(table).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in `value`, outermost first."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    return [(value, key) for key in keys] + [p for key in keys for p in _places(value[key])]


# What reads a file gets it under its name, in a folder of its own


@contextmanager
def _folder_with(name: str, data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="dpipe-fuzz-") as made:
        path = Path(made) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        yield Path(made)


def of_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """`read` gets the path."""

    def decode(data: bytes) -> object:
        with _folder_with(name, data) as folder:
            return read(folder / name)

    return decode


def of_folder(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """`read` gets the folder that has a file of this name."""

    def decode(data: bytes) -> object:
        with _folder_with(name, data) as folder:
            return read(folder)

    return decode


def as_bytes(*values: Any) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(value).encode() for value in values]


def _copied_rows(data: bytes) -> object:
    """As a coordinator that takes over reads them, where somebody else could write."""
    files = {"rows-00000.jsonl": data}
    store = SimpleNamespace(read=lambda number, name: files.get(name))
    return copying._rows(cast(TermStore, store), 1)


def _text(*texts: str) -> Callable[[], list[bytes]]:
    return lambda: [text.encode() for text in texts]


def _watched(data: bytes) -> object:
    """From the rows to what a browser gets."""
    run = points.RunPoints()
    for line in data.splitlines():
        run.add_line(line)
    shown = measured_picture("run", run, None, 0.0)
    return as_json([as_table(shown), points.thinned(run.points, 2)])


# The wire

_HEADER = message.Header(7, "1SEND_F3", TensorSpec((2, 3), torch.float32)).encode()


def _codec_decode(name: str, data: bytes) -> object:
    """What a link has received is as long as `wire_spec` says, whatever is in it."""
    like = TensorSpec((len(data) % 7, 1 + len(data) % 300), torch.float32)
    used = codec(name)
    wire = used.wire_spec(like)
    body = (data * (1 + wire.num_bytes // max(1, len(data))))[: wire.num_bytes]
    decoded = used.decode(message.tensor_of(memoryview(body.ljust(wire.num_bytes)), wire, ""), like)
    assert TensorSpec.of(decoded) == like
    return decoded


def _frames(kinds: type[Message], most: dict[str, int], data: bytes) -> object:
    """One frame after another, each behind its length, as gRPC would give them."""
    parts = []
    while data:
        size = int.from_bytes(data[:2], "big")
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    decoded = list(frame.assemble(parts, kinds, most.__getitem__))
    for each in decoded:
        if isinstance(each, coordinator_pb2.ToCoordinator):
            limits.check(each)
    return decoded


def _as_frames(*kinds: Message) -> list[bytes]:
    return [
        b"".join(len(part).to_bytes(2, "big") + part for part in frame.cut(each)) for each in kinds
    ]


def _to_coordinator() -> list[bytes]:
    pb = coordinator_pb2
    return _as_frames(
        pb.ToCoordinator(join=pb.Join(protocol=1, rank=1, world_size=2, shared='{"a": 1}')),
        pb.ToCoordinator(part=pb.Part(key="step/1", payload=b"{}")),
        pb.ToCoordinator(upload=pb.Upload(kind="trace", payload=b"[]")),
        pb.ToCoordinator(failure=pb.Failure(reason="x", symptom=True)),
        pb.ToCoordinator(ask=pb.Ask(key="step/1")),
    )


def _from_coordinator() -> list[bytes]:
    pb = coordinator_pb2
    return _as_frames(
        pb.FromCoordinator(welcome=pb.Welcome(addresses=[pb.Address(advertised="h:1")])),
        pb.FromCoordinator(whole=pb.Whole(key="step/1", parts=[b"{}", b"{}"])),
        pb.FromCoordinator(missing=pb.Missing(key="step/1", ranks=[1])),
        pb.FromCoordinator(abort=pb.Abort(reason="x")),
    )


def _hello(data: bytes) -> object:
    """What a dialler says of itself in the metadata of a call."""
    metadata = [(grpc_stream._HELLO_KEY, data)]
    context: Any = SimpleNamespace(invocation_metadata=lambda: metadata)
    return grpc_stream.hello_of(context)


def _grpc_greeting(data: bytes) -> object:
    """What somebody answers who was dialled over gRPC."""
    hello = Hello(protocol=1, from_rank=1)
    return grpc_stream._greeted(hello, data, b"")


def _joins(data: bytes) -> object:
    """The configuration that a rank wants to join with."""
    text = data.decode(errors="replace")
    if not membership._is_json_object(text):
        return None
    join = coordinator_pb2.Join(shared=text)
    newcomer: Any = SimpleNamespace(join=join, address="10.0.0.1:5")
    newcomer.shared = membership.Member.shared.func(newcomer)  # type: ignore[attr-defined]
    return membership._compare(newcomer, {"train.steps": 3})


def _greet(data: bytes) -> object:
    """What a stranger says to a port of a transport."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        return greeting.answer(ours, lambda _: (b"token",), time.monotonic() + 5)


def _greetings() -> list[bytes]:
    hello = Hello(protocol=1, from_rank=1, to_rank=0, num_connections=1)
    first = message.framed(Greeting(hello=hello, challenge=bytes(32)).SerializeToString())
    second = message.framed(Greeting(proof=bytes(32)).SerializeToString())
    return [first, first + second]


def _resumable(data: bytes) -> object:
    """What the other end of a link writes."""
    ours, theirs = socket.socketpair()
    session = LinkSession(8.0, may_resume=lambda: False)
    session.attach(ByteFrames(SocketStream(ours)), 0, 0)
    into = bytearray(64)
    with ours, theirs:
        theirs.sendall(data[:60_000])
        theirs.shutdown(socket.SHUT_WR)
        session.read(memoryview(into))
    return into


def _session_frames() -> list[bytes]:
    whole = struct.pack(">IQ", 64, 0) + bytes(64)
    pieces = struct.pack(">IQ", 60, 0) + bytes(60) + struct.pack(">IQ", 0, 0) + whole
    return [whole, pieces]


def _schema(name: str, schema: Schema[Any], *values: Any) -> Decoder:
    return Decoder(
        f"schema {name}",
        lambda data: schema.parse(data, name, 1),
        (TransferError,),
        as_bytes(*values),
        ("dpipe.wire.schema:read",),
    )


_BALLOT = {
    "loss": 1.0,
    "norms": {"0": 2.0},
    "bad": None,
    "stop": False,
    "report": {"bubble": 0.1, "mb_per_s": {"0->1": 1.0}},
}
_DIGEST = "0" * 64
_FILE = f"model-00000-{'0' * 16}.safetensors"
_PART = {
    "bad": None,
    "model": {"names": {"a": _FILE}, "files": {_FILE: {"size": 1, "sha256": _DIGEST}}},
    "layouts": {"a": {"shape": [2, 3], "dim": 0, "parts": 1, "size": 2}},
}
_RUN = {"id": "0" * 16, "folder": "/runs/a", "host": "here"}
_MACHINE = {
    "name": "a",
    "device": "cuda NVIDIA A10G",
    "cores": 4,
    "devices": 1,
    "memory_gb": 2.5,
    "price_per_hour": None,
    "layers": [
        {
            "kind": "block",
            "micro_batch_size": 1,
            "forward_ms": 1.0,
            "backward_ms": 2.0,
            "backward_input_ms": 1.0,
            "backward_weight_ms": 1.0,
        }
    ],
}
_DELAY = {"peer": 1, "delay_ms": 10.0, "jitter_ms": 0.1}
_STREAM = {"gbps": 1.0, "loss_percent": 0.1, "rising": False, "problem": ""}


def _adapter_settings(content: bytes) -> object:
    from dpipe.hub.trained_adapter import read_settings  # imports transformers

    return read_settings(content, "folder")


def _adapter(path: Path) -> object:
    from dpipe.hub.trained_adapter import _open

    with _open(path.parent) as file:
        return [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118


def _published(path: Path) -> object:
    from dpipe.hub.source import ModelSource  # imports transformers
    from dpipe.hub.tensors import SafetensorsWeights

    weights = SafetensorsWeights(ModelSource(path.parent))
    return [weights.read(name) for name in weights.names]


@cache
def _tiny_model() -> Path:
    """A model of one block, as `save_pretrained` writes it."""
    from hub import published

    sizes = {"num_hidden_layers": 1, "vocab_size": 16, "hidden_size": 8, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return published.save("llama", Path(_KEPT.name) / "hub", **sizes, **heads)


def _hub_file(name: str) -> list[bytes]:
    return [(_tiny_model() / name).read_bytes()]


def _hub_configurations() -> list[bytes]:
    """Of a family that dpipe knows, and of one that it tries."""
    (known,) = _hub_file("config.json")
    tried = json.loads(known) | {"model_type": "stablelm"}
    return [known, json.dumps(tried).encode()]


def _hub_configuration(path: Path) -> object:
    """To the model without memory that is cut into layers."""
    from dpipe.hub.skeleton import check_sizes, skeleton_of
    from dpipe.hub.source import find_source
    from dpipe.hub.trial import try_out

    config = find_source(str(path.parent)).config()
    check_sizes(config)
    try_out(config)
    skeleton = skeleton_of(config)
    return [skeleton.layer(index) for index in range(min(3, skeleton.num_layers))]


def _hub_words(data: bytes) -> object:
    """The tokenizer's own configuration, beside a tokenizer.json that is whole."""
    from dpipe.hub.words import Words

    with _folder_with("tokenizer_config.json", data) as folder:
        (folder / "tokenizer.json").write_bytes(_word_level()[0])
        (folder / "config.json").write_bytes(_hub_file("config.json")[0])
        words = Words(build({"model": {"hf": str(folder)}}))
        if words.has_template:
            words.chat([{"role": "user", "content": "a"}], asks=True)
        return words.decode(words.encode("a b"))


def _gguf(path: Path) -> object:
    from dpipe.hub.skeleton import skeleton_of
    from dpipe.hub.source import find_source
    from dpipe.hub.tensors import GgufWeights

    skeleton = skeleton_of(find_source(str(path)).config())
    weights = GgufWeights(path, skeleton)
    names = ("model.norm.weight", "lm_head.weight")
    return [weights.read(name) for name in names if name in weights]


@cache
def _gguf_of_a_model() -> list[bytes]:
    import gguf

    path = Path(_KEPT.name) / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(16)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_vocab_size(16)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    blocks = gguf.quantize(np.ones((16, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("output.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return [path.read_bytes()]


WIRE = [
    Decoder(
        "tensor header",
        message.Header.decode,
        (TransferError,),
        lambda: [_HEADER],
        ("dpipe.wire.message:decode",),
    ),
    Decoder(
        "framed message",
        lambda data: message.Header.decode(message.unframed(data)[0]),
        (TransferError,),
        lambda: [message.framed(_HEADER) + bytes(24)],
    ),
    *(
        Decoder(
            f"codec {name}",
            partial(_codec_decode, name),
            (),
            lambda: [bytes(range(256)), b"\0\0\xc0\x7f" * 9, b"\xff" * 300],
            ("dpipe.wire.message:tensor_of",),
        )
        for name in FORMATS
    ),
    Decoder(
        "notes of a measurement",
        notes.decode,
        (TransferError,),
        lambda: [
            notes.Note(notes.NoteKind.PING, 3).encode(),
            notes.Note(notes.NoteKind.DONE, 2**63).encode() * 2 + b"\1\0",
        ],
    ),
    *(
        _schema(f"measure {name}", schema, value)
        for name, schema, value in (
            ("machine", reports.MACHINE_REPORT, _MACHINE),
            ("date", reports.DATE, "2026-11-24T02:40:00Z"),
            ("problems", reports.PROBLEMS, [{"peer": 1, "reason": "x"}]),
            ("delays", reports.PEERS_REPORT, {"delays": [_DELAY], "problems": []}),
            ("stream", reports.STREAM_REPORT, _STREAM),
            ("together", reports.TOGETHER_REPORT, {"egress_gbps": 1.0, "ingress_gbps": 2.0}),
        )
    ),
    Decoder(
        "message to the coordinator",
        partial(_frames, coordinator_pb2.ToCoordinator, limits.TO_COORDINATOR),
        (DecodeError,),
        _to_coordinator,
        ("dpipe.coordinator.frame:assemble",),
    ),
    Decoder(
        "message from the coordinator",
        partial(_frames, coordinator_pb2.FromCoordinator, limits.FROM_COORDINATOR),
        (DecodeError,),
        _from_coordinator,
    ),
    Decoder(
        "frames of a link",
        _resumable,
        (TransferError, ConnectionError),
        _session_frames,
        ("dpipe.session.frames:_begin",),
    ),
    Decoder(
        "greeting of a transport",
        _greet,
        (TransferError, ConnectionError, TimeoutError),
        _greetings,
        ("dpipe.session.greeting:_receive",),
    ),
    Decoder(
        "hello of a gRPC transport",
        _hello,
        (),
        lambda: [Hello(protocol=1, from_rank=1).SerializeToString()],
        ("dpipe.session.grpc_stream:hello_of",),
    ),
    Decoder(
        "greeting of a gRPC transport",
        _grpc_greeting,
        (TransferError,),
        lambda: [Greeting(hello=Hello(protocol=1, from_rank=1), secret=b"x").SerializeToString()],
        ("dpipe.session.grpc_stream:_greeted",),
    ),
    Decoder(
        "configuration of a rank that joins",
        _joins,
        (),
        as_bytes({"train.steps": 4, "model.layers": "gpt"}),
        ("dpipe.coordinator.membership:_is_json_object", "dpipe.coordinator.membership:shared"),
    ),
    _schema("ballot", BALLOT, _BALLOT),
    _schema(
        "plan of rank 0",
        shared.DECISION,
        [[0.1], "0F0,0B0\n", "1f1b", [["bf16"], ["int4"]], [2, 3], 20],
        None,
    ),
    _schema("plan for all ranks", shared.PLAN, "[plan]\n", ""),
    _schema("checkpoint found", shared.CHECKPOINT_FOUND, 7),
    _schema("place", shared.PLACE, {"machine": "a", "name": "b", "port": 7}),
    _schema("embedded server", shared.EMBEDDED, {"session": "0" * 16, "port": 7}),
    _schema("port of a store", shared.STORE_PORT, 7),
    _schema("machine", shared.MACHINE, ["a", [0, 7]]),
    _schema("held-out losses", SCORES, {"losses": [1.0], "accuracies": []}),
    _schema("part of a checkpoint", PART, _PART),
    _schema("run of rank 0", identity.RUN, {**_RUN, "start": "0" * 16}, None),
    _schema("offer of NCCL", NCCL_OFFER, ["GPU-1", [[1, [7, 8]]]]),
]

# Parameter servers

_SPEC = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)), 16
)
_RULE = StepRule((0, 4), 0.1, (0.9, 0.95), "int8")


def _attended(data: bytes) -> object:
    spec, rule = messages.spec_and_rule(message.message_of(parameters_pb2.Attendance, data))
    return spec.num_chunks, spec.length, spec.starts, rule.lossy_parameters


def _described(field: str, data: bytes) -> object:
    """One of the two texts of an attendance, the other one whole."""
    attendance = messages.attendance(_SPEC, _RULE, 3, again=False)
    setattr(attendance, field, data.decode(errors="replace"))
    return _attended(attendance.SerializeToString())


def _loaded(data: bytes) -> object:
    """Pieces, each behind its length."""
    parts = []
    while data:
        size = int.from_bytes(data[:2], "big")
        parts.append(data[2 : 2 + size])
        data = data[2 + size :]
    return messages.vectors_from(_SPEC, iter(parts))


def _pieces() -> list[bytes]:
    every = messages.pieces_of(_SPEC, {"values": torch.zeros(33), "exp_avg": torch.ones(33)})
    return [b"".join(len(part).to_bytes(2, "big") + part for part in every)]


def _average() -> list[bytes]:
    metadata = {"session": "run 1", "verdict": "[0.01, 1.0]"}
    return [save({"average": torch.zeros(33)}, metadata)]


@cache
def _snapshot() -> tuple[Path, bytes]:
    """The folder of a snapshot, kept for as long as this process runs, and its index."""
    folder = Path(_KEPT.name) / "snapshot"
    state = {"session": "run 1", "num_updates": 3, "row": asdict(_SPEC), "rule": asdict(_RULE)}
    split = partial(journal._split, _SPEC)
    moments: dict[str, torch.Tensor] = {}
    for suffix in (".exp_avg", ".exp_avg_sq", ".master"):
        moments |= split(suffix, torch.zeros(33))
    FolderSnapshots().save(folder, 3, split("", torch.zeros(33)), moments, state)
    return folder, (folder / "step-00000003/index.json").read_bytes()


_KEPT = tempfile.TemporaryDirectory(prefix="dpipe-fuzz-")


def _recovered(data: bytes) -> object:
    folder, _ = _snapshot()
    (folder / "step-00000003/index.json").write_bytes(data)
    return journal.recover(folder, FolderSnapshots())


PARAMETER_SERVER = [
    Decoder(
        "attendance",
        _attended,
        (TransferError,),
        lambda: [messages.attendance(_SPEC, _RULE, 3, again=False).SerializeToString()],
        ("dpipe.wire.message:message_of", "dpipe.paramserver.messages:spec_and_rule"),
    ),
    Decoder(
        "layout of a stage", partial(_described, "row"), (TransferError,), as_bytes(asdict(_SPEC))
    ),
    Decoder(
        "rule of a stage", partial(_described, "rule"), (TransferError,), as_bytes(asdict(_RULE))
    ),
    Decoder(
        "place of a worker",
        partial(message.message_of, parameters_pb2.Place),
        (TransferError,),
        lambda: [parameters_pb2.Place(session="run 1", step=3).SerializeToString()],
    ),
    Decoder("pieces of a stage", _loaded, (TransferError,), _pieces),
    Decoder(
        "step in a journal",
        of_file("average-00000003.safetensors", lambda path: journal._read(path, "run 1")),
        (CheckpointError,),
        _average,
        ("dpipe.paramserver.journal:_read",),
    ),
    Decoder(
        "rows that a coordinator has copied",
        _copied_rows,
        (),
        _text(
            '{"step": 1, "loss": 2.5}\n{"step": 2, "held_out_loss": 2.4}\n',
            '{"step": 1e999}\n{"step": NaN}\n{"step": "x"}\n[]\n',
        ),
        ("dpipe.terms.copying:_rows",),
    ),
    Decoder(
        "snapshot in a journal",
        _recovered,
        (CheckpointError,),
        lambda: [_snapshot()[1]],
        ("dpipe.paramserver.journal:recover",),
    ),
]

# The folder of a run, and checkpoints

_STEP = "step-00000003"


@cache
def _checkpoint() -> tuple[Path, bytes]:
    folder = Path(_KEPT.name) / "checkpoint"
    weight = {"layers.0.weight": torch.arange(6.0).reshape(2, 3)}
    moments = {
        "layers.0.weight.exp_avg[0:3]": torch.zeros(3),
        "layers.0.weight.exp_avg[3:6]": torch.ones(3),
    }
    state = {"num_updates": 3, "loss_scale": 2.0, "good_steps": 1, "configuration": {"a.b": 1}}
    run = identity.RunIdentity(**_RUN)
    checkpoint.save(str(folder), 3, 0, weight, moments, state, lambda part: [part], 1, run=run)
    return folder, (folder / _STEP / "index.json").read_bytes()


def _indexed(data: bytes) -> object:
    folder, _ = _checkpoint()
    (folder / _STEP / "index.json").write_bytes(data)
    identity.owner_of(str(folder))
    checkpoint.saved_configuration(str(folder))
    return checkpoint.load(str(folder), lambda name: True)


def _plan() -> list[bytes]:
    schedule = lower(generate("1f1b", 2, 2), reduce=True)
    inputs = TraceInputs(
        schedule, Cost.uniform(2, 10, 20, 1000), None, replicas=Replicas(direct(3, 2))
    )
    with _folder_with("plan.json", b"") as folder:
        save_inputs(folder, inputs)
        return [(folder / "plan.json").read_bytes()]


def _spans() -> list[bytes]:
    span = Span(1, Lane.SEND, parse_action("1SEND_B0"), 2.0, 3.0, 4000, peer=3)
    return [dump_steps([StepSpans(7, (span,))])]


def _rows(path: Path) -> object:
    return list(rows.read_rows(rows.local_files([path])))


def _kept_rows(path: Path) -> object:
    keep_rows_before(path, 5)
    return read_rows(path.parent)


RUN_FOLDER = [
    Decoder(
        "index of a checkpoint",
        _indexed,
        (CheckpointError,),
        lambda: [_checkpoint()[1]],
        (
            "dpipe.store.storage:parsed_json",
            "dpipe.store.checkpoint:_read_tensors",
        ),
    ),
    Decoder(
        "run.json", of_folder("run.json", identity.identity_of), (CheckpointError,), as_bytes(_RUN)
    ),
    Decoder(
        "config.json",
        of_folder("config.json", load_configuration),
        (ConfigError,),
        lambda: [json.dumps(build({}).model_dump(mode="json", exclude={"node"})).encode()],
    ),
    Decoder(
        "plan.json",
        of_folder("plan.json", load_inputs),
        (ConfigError,),
        _plan,
    ),
    Decoder(
        "rank-1.json",
        lambda data: load_steps(data, 1),
        (ValueError, ScheduleError),
        _spans,
    ),
    Decoder(
        "metrics.jsonl",
        of_folder("metrics.jsonl", read_rows),
        (CheckpointError,),
        _text('{"step": 0, "loss": 1.0, "norms": {"a": 1}}\n{"step": 1}\n'),
    ),
    Decoder(
        "rows before a step",
        of_file("metrics.jsonl", _kept_rows),
        (),
        _text('{"step": 0, "loss": 1.0}\n{"step": 9}\n'),
        ("dpipe.report.metrics:_step_of",),
    ),
    Decoder(
        "rows of a run that is watched",
        _watched,
        (),
        _text(
            '{"step": 0, "loss": 1.0, "step_s": 0.5, "mb_per_s": {"0->1": 2.0}}\n'
            '{"step": 9, "held_out_loss": 1.0}\n{"step": 9, "step_s": 1e308, "bubble": 0.5}\n'
        ),
        ("dpipe.watch.points:add_line",),
    ),
]

# Copies of layers in memory, of other machines


def _copy_of_layer() -> list[bytes]:
    weight = {"layers.2.weight": torch.arange(6.0).reshape(2, 3)}
    moments = {"layers.2.weight.exp_avg": torch.ones(2, 3)}
    return [copy.content for copy in pack(3, weight, moments, {"num_updates": 3}, [2])]


KEEPER = [
    Decoder(
        "copy of a layer",
        lambda data: unpack([PieceCopy(3, 2, data)]),
        (CheckpointError,),
        _copy_of_layer,
        ("dpipe.keeper.copies:_state_of",),
    ),
    Decoder(
        "request to a keeper",
        REQUEST.read,
        (ValueError,),
        as_bytes({"get": {"epoch": 1, "step": 2, "piece": 3}}),
    ),
    Decoder(
        "answer of a keeper",
        ANSWER.read,
        (ValueError,),
        as_bytes({"size": 3, "digest": "0" * 64}),
    ),
]


def _journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / JOURNAL
        path.write_bytes(data)
        RunJournal(path).close()


def _journal_of_a_run() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / JOURNAL
        journal = RunJournal(path)
        journal.begin(Epoch(1, 0, ("0123456789abcdef",)))
        journal.note("somebody joined")
        journal.close()
        return [path.read_bytes()]


_WORK = {"epoch": 3, "outcome": "left", "reason": ""}
_ENLIST = {
    "kind": "enlist",
    "protocol": 1,
    "version": "0.1.0",
    "run": "",
    "agent": "0123456789abcdef",
    "name": "m",
    "host": "h",
    "keeper": "10.0.0.1:4000",
    "memory_bytes": 1,
    "epoch": 3,
    "working": False,
    "held": {"4": [0, 1]},
    "last": _WORK,
}
_STATUS = {
    "run": "runs/run",
    "phase": "running",
    "epoch": 1,
    "step": 2,
    "steps": 3,
    "servers": ["10.0.0.5:7100"],
    "ranks": 4,
    "wanted": 4,
    "agents": [],
    "goodput": 0.5,
    "lost_s": 1.5,
    "run_s": 20.0,
    "events": [[1.0, "somebody joined"]],
}
_JOB = {"version": "0.1.0", "config": {"train": {"steps": 3}}, "layer_costs": "d1 [[], []]"}
_COST = {
    "forward_flops": 1.5,
    "parameter_bytes": 4,
    "outputs": [[[2, 6], "float32"]],
    "attention_cores": 1,
    "core_flops": 1.0,
    "largest_parameter_bytes": 4,
    "kept_bytes": 8,
}
ELASTIC = [
    Decoder(
        "message of an agent",
        FROM_AGENT.read,
        (ValueError,),
        as_bytes(
            _ENLIST,
            {"kind": "ended", "report": _WORK, "held": {"4": [0]}},
            {"kind": "row", "epoch": 1, "row": {"step": 3, "loss": 1.5}},
            {"kind": "vouched", "epoch": 1, "step": 4, "digests": {"0": _DIGEST}},
        ),
    ),
    Decoder(
        "message to an agent",
        TO_AGENT.read,
        (ValueError,),
        as_bytes(
            {"kind": "stop", "epoch": 3, "after_step": True},
            {"kind": "assigned", "resume_step": 3, "assignment": {"epoch": 1}},
        ),
    ),
    Decoder("job of an elastic run", JOB_OFFER.read, (ValueError,), as_bytes(_JOB)),
    Decoder(
        "layer costs of a job",
        lambda data: layer_costs("d1", "d1 " + data.decode("utf-8", "replace")),
        (ConfigError,),
        as_bytes([[_COST], [0, 0]]),
    ),
    Decoder(
        "what an elastic run's status is asked for",
        STATUS_REQUEST.read,
        (ValueError,),
        as_bytes({"rows_from": 12}, {"rows_from": None}, {}),
    ),
    Decoder("status of an elastic run", STATUS.read, (ValueError,), as_bytes(_STATUS)),
    Decoder(
        "who is to leave",
        LEAVE_REQUEST.read,
        (ValueError,),
        as_bytes({"name": "m", "within_s": 1.0}),
    ),
    Decoder(
        "a parameter server that has moved",
        SERVER_MOVED.read,
        (ValueError,),
        as_bytes({"address": "10.0.0.9:7100", "instead_of": None}, {"address": "[::1]:7100"}),
    ),
    Decoder(
        "where an elastic run's parameter servers are",
        SERVERS_KNOWN.read,
        (ValueError,),
        as_bytes({"addresses": ["10.0.0.9:7100"], "refusal": ""}, {"addresses": []}),
    ),
    Decoder("journal of an elastic run", _journal, (CheckpointError,), _journal_of_a_run, share=4),
    Decoder(
        "notice of a cloud",
        lambda data: (aws_notice(data.decode()), azure_notice(data.decode())),
        (ValueError,),
        as_bytes({"action": "stop", "time": "2026-11-23T16:00:00Z"}, {"Events": [{}]}),
    ),
]

# Files that people share

_PLAN = """
[plan]
model = "70b818208d4cfcff"
machines = "machines"
step_s = 0.35
price_per_million_tokens = 0.08
[train]
num_microbatches = 2
[pipeline]
stages = 2
split = [4, 2]
schedule = "auto"
programs = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]
[tensor_parallel]
size = 2
[data_parallel]
kind = "all-reduce"
replicas = 2
[[replica]]
machines = ["a", "b"]
[[replica]]
machines = ["c", "d"]
"""
_MACHINES = """
[measured]
at = "2026-11-23T12:00:00Z"
model = "5f84501"
[default_link]
delay_ms = 0.1
bandwidth_gbps = 10
[[machine]]
name = "a"
host = "10.0.0.1"
device = "cpu"
devices = 2
cores = 2
memory_gb = 12.3
gflops = 20
price_per_hour = 1.2
egress_gbps = 1
ingress_gbps = 0.5
[[machine.layer]]
kind = "block"
micro_batch_size = 1
forward_ms = 1
backward_ms = 2
backward_input_ms = 1.1
backward_weight_ms = 0.9
[[machine]]
name = "b"
[[link]]
from = "a"
to = "b"
delay_ms = 10
bandwidth_gbps = 1
loss_percent = 0.1
"""
_PROFILE = """
name = "two sites"
delay_ms = 0.1
bandwidth_gbps = 10
window_bytes = 4e6
[[link]]
from = 0
to = 1
delay_ms = 50
bandwidth_gbps = 1
jitter_ms = 1
loss_percent = 0.1
"""
_JOB = """
[model]
layers = "gpt"
num_layers = 4
options = { a = [1, 2] }
[data]
files = ["a.txt", "package:torch/*.md"]
[train]
betas = [0.9, 0.95]
eval_every = 3
[pipeline]
stages = 2
schedule = "zero-bubble"
split = [3, 3]
memory_gb = 16
[data_parallel]
kind = "parameter-server"
replicas = 2
address = "10.0.0.1:7000"
[replay]
forward_ms = [1, 2]
"""
_HOSTS = """
user = "ubuntu"
coordinator_port = 7001
[[host]]
address = "18.185.3.4"
advertise = "10.0.0.4"
[[host]]
address = "18.185.3.5"
slots = 2
ssh_options = ["ProxyJump=bastion"]
folder = "~/runs"
"""


def _override(data: bytes) -> object:
    with _folder_with("job.toml", b"") as folder:
        return load(folder / "job.toml", (data.decode(errors="replace"),))


def _word_level() -> list[bytes]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[SEP]"])
    return [tokenizer.to_str().encode()]


def _applied(path: Path) -> object:
    tokenizer = FileTokenizer(str(path))
    return tokenizer.decode(tokenizer.encode("a b a c [SEP]"))


def _cached(name: str, data: bytes) -> object:
    """A damaged cache is rebuilt, so the tokens are always those of the text."""
    folder = Path(_KEPT.name)
    text = folder / "text.txt"
    text.write_text("some text " * 30)
    prepared = partial(prepare, [str(text)], ByteTokenizer(), folder / "cache", 0.1)
    prepared()
    (inside,) = (folder / "cache").iterdir()
    (inside / name).write_bytes(data)
    tokens = prepared().tokens
    assert bytes(np.asarray(tokens, np.uint8)) == text.read_bytes()
    return tokens


def _cache_of(name: str) -> list[bytes]:
    _cached("none", b"")
    (inside,) = (Path(_KEPT.name) / "cache").iterdir()
    return [(inside / name).read_bytes()]


def _machines_of_hosts(path: Path) -> object:
    """Read as what it says it is, and as machines; what is read can be written."""
    load_hosts_network(path)
    return parse_machines(parse_toml(dump_machines(load_machines(path))))


FILES = [
    Decoder(
        "network profile",
        of_file("network.toml", load_network),
        (ProfileError,),
        _text(_PROFILE),
        ("dpipe.toml:parse_toml", "dpipe.network.profile:load_network"),
    ),
    Decoder(
        "plan file",
        of_file("plan.toml", load_plan),
        (ConfigError,),
        _text(_PLAN),
        ("dpipe.planner.plan_file:load_plan",),
    ),
    Decoder(
        "text of the plan of rank 0",
        lambda data: plan_of_rank_0(data.decode(errors="surrogateescape")),
        (TransferError,),
        _text(_PLAN),
        ("dpipe.planner.plan_file:plan_of_rank_0",),
    ),
    Decoder(
        "machines file",
        of_file("machines.toml", _machines_of_hosts),
        (ProfileError,),
        _text(_MACHINES),
        ("dpipe.machines.file:load_machines", "dpipe.machines.file:lists_machines"),
    ),
    Decoder(
        "configuration",
        of_file("job.toml", load),
        (ConfigError,),
        _text(_JOB),
        ("dpipe.config.load:read_table",),
    ),
    Decoder(
        "configuration in JSON",
        of_file("job.json", load),
        (ConfigError,),
        lambda: [json.dumps(build({}).model_dump(mode="json")).encode()],
    ),
    Decoder(
        "override",
        _override,
        (ConfigError,),
        _text("train.steps=100", "model.options={a = 1}", 'data.files=["a"]'),
        ("dpipe.config.load:_value",),
    ),
    Decoder("hosts file", of_file("hosts.toml", load_hosts), (HostsError,), _text(_HOSTS)),
    Decoder(
        "schedule in CSV",
        lambda data: from_csv(data.decode(errors="replace")),
        (ScheduleError,),
        lambda: [to_csv(generate("1f1b", 2, 3)).encode()],
    ),
    Decoder(
        "tokenizer.json",
        of_file("tokenizer.json", _applied),
        (DataError,),
        _word_level,
        ("dpipe.tokenizer.process:ask", "dpipe.tokenizer.child:main"),
        share=50,
    ),
    Decoder(
        "rows, one a line",
        of_file("rows.jsonl", _rows),
        (DataError,),
        _text('{"instruction": "a", "output": "b"}\n\n{"messages": []}\n'),
        ("dpipe.data.rows:_as_row",),
    ),
    Decoder(
        "rows in a list",
        of_file("rows.json", _rows),
        (DataError,),
        _text('[{"instruction": "a", "output": "b"}]'),
        ("dpipe.data.rows:_json",),
    ),
    Decoder(
        "rows of a table",
        of_file("rows.csv", _rows),
        (DataError,),
        _text('instruction,output\na,"b"\n'),
    ),
    Decoder(
        "marks of a stream of rows",
        marks_in,
        (),
        _text("[256, 0, 1, 3, 0, 1000, 0]\n[512, 1, 0, 0, 0, 0, 0]\n"),
        ("dpipe.data.stream:marks_in",),
    ),
    Decoder(
        "weights of a published model",
        of_file("model.safetensors", _published),
        (CheckpointError,),
        lambda: [save({"a.weight": torch.ones(3), "b": torch.zeros(2, 2)})],
        ("dpipe.hub.tensors:_open",),
        share=4,
    ),
    Decoder(
        "column of the samples' cache",
        of_file("tokens", lambda path: mapped(path, np.int32)[:10]),
        (DataError,),
        lambda: [np.arange(5, dtype=np.int32).tobytes()],
        ("dpipe.data.samples:mapped",),
    ),
    Decoder(
        "adapter_config.json of a trained adapter",
        _adapter_settings,
        (ConfigError,),
        _text('{"r": 16, "lora_alpha": 32.0, "target_modules": ["q_proj"]}'),
        ("dpipe.hub.trained_adapter:read_settings",),
    ),
    Decoder(
        "safetensors of a trained adapter",
        of_file("adapter_model.safetensors", _adapter),
        (CheckpointError,),
        lambda: [save({"a.lora_A.weight": torch.ones(3), "b": torch.zeros(2, 2)})],
        ("dpipe.hub.trained_adapter:_open",),
        share=4,
    ),
    Decoder(
        "index of a published model's shards",
        lambda data: read_index(data, "index.json"),
        (CheckpointError,),
        _text('{"metadata": {}, "weight_map": {"a.weight": "model-1.safetensors"}}'),
        ("dpipe.hub.index:read_index",),
    ),
    Decoder(
        "line of a log",
        lambda data: log_line(data.decode(errors="replace")),
        (),
        _text(
            '{"time": "2026-11-23T12:00:00.000+00:00", "message": "x"}',
            "2026-11-23 12:00:00,000 rank 0 x",
        ),
        ("dpipe.watch.folder:log_line",),
    ),
    Decoder(
        "config.json of a published model",
        of_file("config.json", _hub_configuration),
        (ConfigError,),
        _hub_configurations,
        ("dpipe.hub.source:config", "dpipe.hub.trial:_reason"),
        share=4,
    ),
    Decoder(
        "tokenizer_config.json of a published model",
        _hub_words,
        (ConfigError, DataError),
        as_bytes(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "[SEP]",
                "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
            }
        ),
        ("dpipe.hub.words:_loaded",),
        share=4,
    ),
    Decoder(
        "published model in GGUF",
        of_file("model.gguf", _gguf),
        (CheckpointError, ConfigError),
        _gguf_of_a_model,
        (
            "dpipe.hub.gguf_header:_number",
            "dpipe.hub.gguf_header:check",
            "dpipe.hub.tensors:__init__",
        ),
        share=4,
    ),
    Decoder(
        "corpus.json of the token cache",
        partial(_cached, "corpus.json"),
        (),
        partial(_cache_of, "corpus.json"),
        ("dpipe.data.corpus:_open",),
        share=4,
    ),
    Decoder(
        "tokens.bin of the token cache",
        partial(_cached, "tokens.bin"),
        (),
        partial(_cache_of, "tokens.bin"),
        share=4,
    ),
]

DECODERS = [*WIRE, *PARAMETER_SERVER, *RUN_FOLDER, *KEEPER, *ELASTIC, *FILES]

# Functions that parse data from this machine or this process.
OWN = {
    "dpipe.session.window:number": "what the kernel says of a socket",
    "dpipe.session.window:tcp_info": "what the kernel says of a socket",
    "dpipe.bench.gloo:compare_transport": "between processes of one measurement",
    "dpipe.bench.loopback:measure_loopback": "between processes of one measurement",
    "dpipe.data.corpus:_bigram_bits": "counts the bytes of a text",
    "dpipe.hub.trial:_renamed": "what save_pretrained has written just before",
    "dpipe.keeper.copies:pack": "the numbers of this process, which it has just written",
    "dpipe.report.rows:take": "what rank 0, a child of this process, has written to a pipe",
}
