"""Copies of layers in memory: packed and unpacked, kept and forgotten, served and refused."""

import hashlib
import math
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save

from dpipe.errors import CheckpointError, JoinError, RunError, TransferError
from dpipe.keeper import server
from dpipe.keeper.client import Fetching, KeeperClient
from dpipe.keeper.copies import PieceCopy, layer_of, pack, unpack
from dpipe.keeper.keeper import Keeper
from dpipe.keeper.messages import Offered, Refused
from dpipe.wire.rpc import Security

TOKEN = Security(token="secret")


def copies_before(step: int, layers: int = 2) -> list[PieceCopy]:
    tensors = {f"layers.{n}.weight": torch.full((3, 2), float(n + step)) for n in range(layers)}
    moments = {f"layers.{n}.weight.exp_avg": torch.rand(3, 2) for n in range(layers)}
    return pack(step, tensors, moments, {"num_updates": step}, range(layers))


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    with Keeper(security=TOKEN, max_bytes=10_000) as one:
        yield one


@pytest.fixture
def client(keeper: Keeper) -> Iterator[KeeperClient]:
    with KeeperClient(keeper.address, TOKEN) as one:
        yield one


# Packed


def test_copies_become_what_a_checkpoint_gives() -> None:
    weight = torch.rand(4, 3).T  # with gaps
    half = torch.rand(2).bfloat16()
    moment = torch.rand(3, 4)
    packed = pack(
        7,
        {"layers.1.weight": weight, "layers.2.bias": half},
        {"layers.1.weight.exp_avg": moment},
        {"num_updates": 7, "loss_scale": None},
        [1, 2, 3],
    )
    assert [copy.piece for copy in packed] == [1, 2, 3]
    loaded = unpack(packed)
    assert (loaded.step, loaded.state) == (7, {"num_updates": 7, "loss_scale": None})
    assert torch.equal(loaded.tensors["layers.1.weight"], weight)
    assert loaded.tensors["layers.2.bias"].dtype is torch.bfloat16
    assert torch.equal(loaded.optimizer["layers.1.weight.exp_avg"], moment)
    with pytest.raises(CheckpointError, match=r"holds no layers\.9\.weight"):
        loaded.tensors["layers.9.weight"]


def test_packed_copy_does_not_change_with_the_tensor() -> None:
    weight = torch.zeros(4)
    packed = pack(1, {"layers.0.w": weight}, {}, {}, [0])
    weight += 1
    assert torch.equal(unpack(packed).tensors["layers.0.w"], torch.zeros(4))


def test_copies_of_two_states_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"not of one state: steps \[1, 2\]"):
        unpack([copies_before(1)[0], copies_before(2)[1]])
    with pytest.raises(CheckpointError, match="not of one state"):
        unpack([])


def test_copy_that_is_damaged_or_of_another_layer_is_refused() -> None:
    (copy,) = copies_before(1, layers=1)
    with pytest.raises(CheckpointError, match="layer 0 is damaged"):
        unpack([PieceCopy(1, 0, copy.content[:-3])])
    with pytest.raises(CheckpointError, match="the copy of layer 5 holds"):
        unpack([PieceCopy(1, 5, copy.content)])
    for state in (None, torch.zeros(3), torch.tensor(list(b"[1]"), dtype=torch.uint8)):
        content = {} if state is None else {"state": state}
        with pytest.raises(CheckpointError, match="it has no state"):
            unpack([PieceCopy(1, 0, save(content))])
    broken = {"state": torch.tensor(list(b"{"), dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match="it has no state"):
        unpack([PieceCopy(1, 0, save(broken))])
    with pytest.raises(CheckpointError, match="names no layer"):
        layer_of("weight")


# Kept


def test_keeper_says_what_it_holds_until_it_is_retired(keeper: Keeper) -> None:
    for step in (10, 20):
        keeper.hold(copies_before(step))
    assert keeper.held() == {10: [0, 1], 20: [0, 1]}
    assert keeper.num_bytes == sum(len(c.content) for s in (10, 20) for c in copies_before(s))
    keeper.retire(before=20)
    assert keeper.held() == {20: [0, 1]}
    keeper.fence(3, newest=15)
    assert keeper.held() == {}
    assert keeper.num_bytes == 0


def test_copies_of_some_layers_are_kept_of_some_steps(keeper: Keeper) -> None:
    for step in (10, 11, 12):
        keeper.hold(copies_before(step))
    keeper.keep([1], [10, 12])
    assert keeper.held() == {10: [0, 1], 11: [0], 12: [0, 1]}


# Served


def test_copy_is_put_on_one_keeper_and_fetched_from_it(
    keeper: Keeper, client: KeeperClient
) -> None:
    sent = copies_before(5)
    chunks: list[int] = []
    for copy in sent:
        client.put(1, copy, before_chunk=lambda: chunks.append(1))
    assert keeper.held() == {5: [0, 1]}
    assert len(chunks) == 2
    nobody = "127.0.0.1:1"
    with Fetching(1, TOKEN, on_connect=lambda opened: None) as fetching:
        fetched = [fetching.fetch(5, layer, (nobody, keeper.address)) for layer in (0, 1)]
    assert fetched == sent


def test_copy_that_is_there_already_is_not_sent_again(keeper: Keeper, client: KeeperClient) -> None:
    """Also where it is the keeper's own: a replica of the layer, or a rank of an older cut."""
    chunks: list[int] = []
    own, *_ = copies_before(5)
    keeper.hold([PieceCopy(4, 0, b"older"), own])
    client.put(1, own, before_chunk=lambda: chunks.append(1))
    assert chunks == []
    with pytest.raises(Refused, match="is of this rank itself"):
        client.put(1, PieceCopy(5, 0, b"another"))
    client.put(1, copies_before(6)[0], before_chunk=lambda: chunks.append(1))
    assert len(chunks) == 1


def test_run_may_go_back_to_what_was_last_whole_everywhere(keeper: Keeper) -> None:
    for step in (10, 20, 21):
        keeper.hold(copies_before(step))
    keeper.guarded = (10, 20)
    assert keeper.fallbacks(21) == {10, 20, 21}
    keeper.agree(1, 20)
    keeper.guarded = ()
    assert keeper.fallbacks(21) == {20, 21}


def test_copy_that_is_whole_takes_the_place_of_earlier_ones(
    keeper: Keeper, client: KeeperClient
) -> None:
    """A process without a rank hears of nothing but what it is sent."""
    for copy in copies_before(1):
        client.put(1, copy)
    for step in (2, 4, 6):
        client.put(1, copies_before(step)[0], kept=[2])
    assert keeper.held() == {2: [0], 6: [0]}


def test_layer_that_nobody_gives_is_named_with_each_reason(keeper: Keeper) -> None:
    with Fetching(1, TOKEN, on_connect=lambda opened: None) as fetching:
        with pytest.raises(RunError, match=r"layer 4 before step 9 .* nobody holds it"):
            fetching.fetch(9, 4, ())
        with pytest.raises(RunError, match=r"127\.0\.0\.1:1: .*; .* is not held here"):
            fetching.fetch(9, 4, ("127.0.0.1:1", keeper.address))


def test_earlier_epoch_is_refused(keeper: Keeper, client: KeeperClient) -> None:
    keeper.hold(copies_before(5))
    keeper.fence(4, newest=5)
    for ask in (lambda: client.get(3, 5, 0), lambda: client.put(3, copies_before(6)[0])):
        with pytest.raises(Refused, match="epoch 3 is over: this keeper is in epoch 4"):
            ask()
    assert client.get(4, 5, 0) == keeper.find(5, 0)


def test_epoch_that_ends_while_a_copy_comes_refuses_it(
    keeper: Keeper, client: KeeperClient
) -> None:
    with pytest.raises(Refused, match="epoch 1 is over"):
        client.put(1, copies_before(5)[0], before_chunk=lambda: keeper.fence(2, newest=math.inf))
    assert keeper.held() == {}
    client.put(2, copies_before(6)[0])  # the connection is in order


def test_what_does_not_fit_is_refused_before_it_is_sent(
    keeper: Keeper, client: KeeperClient
) -> None:
    large = PieceCopy(1, 0, bytes(6_000))
    client.put(1, large)
    keeper.hold([PieceCopy(1, 7, bytes(6_000))])  # its own are not counted
    with pytest.raises(Refused, match="6000 bytes does not fit: 4000 are left here"):
        client.put(1, PieceCopy(2, 0, bytes(6_000)))
    keeper.retire(before=2)
    client.put(1, PieceCopy(2, 0, bytes(6_000)))


def test_damaged_copy_is_refused_at_either_end(keeper: Keeper, client: KeeperClient) -> None:
    copy = copies_before(1)[0]
    copy.__dict__["digest"] = hashlib.sha256(b"another").hexdigest()
    with pytest.raises(Refused, match="piece 0 arrived damaged"):
        client.put(1, copy)
    keeper.hold([copy])
    with pytest.raises(TransferError, match="arrived damaged"):
        client.get(1, 1, 0)


def test_no_memory_is_taken_for_what_is_announced_too_large(
    keeper: Keeper, client: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.keeper.client.MAX_COPY_BYTES", 10)
    keeper.hold(copies_before(1))
    with pytest.raises(TransferError, match="bytes for piece 0"):
        client.get(1, 1, 0)


def test_promise_ends_with_the_connection(keeper: Keeper) -> None:
    offered = Offered(epoch=1, step=1, piece=0, size=9_000, digest="0" * 64)
    keeper.make_room(offered)
    keeper.take(offered, None)
    keeper.make_room(offered)


def test_stranger_is_refused(keeper: Keeper) -> None:
    with pytest.raises(JoinError, match="wrong token"):
        KeeperClient(keeper.address, Security(token="guessed"))


def test_keeper_of_another_protocol_is_refused(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.keeper.client.PROTOCOL", server.PROTOCOL + 1)
    with pytest.raises(JoinError, match="install one dpipe version everywhere"):
        KeeperClient(keeper.address, TOKEN)


def test_request_of_another_shape_ends_the_connection_alone(
    keeper: Keeper, client: KeeperClient
) -> None:
    client._socket.sendall(server.framed(b'{"get": 1}'))
    with pytest.raises(ConnectionError):
        client.get(1, 1, 0)
    with KeeperClient(keeper.address, TOKEN) as again:
        again._socket.sendall(server.framed(b"{}"))
        with pytest.raises(Refused, match="asks nothing"):
            again._hear()


def test_who_does_not_answer_as_a_keeper_is_named(keeper: Keeper, client: KeeperClient) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client._socket.close()
        client._socket = ours
        theirs.sendall(server.framed(b"[]"))
        with pytest.raises(TransferError, match="does not answer as a keeper"):
            client.get(1, 1, 0)


def test_tls_is_that_of_the_links(authority: type) -> None:
    security = authority().security()
    with Keeper(security=security) as one, KeeperClient(one.address, security) as client:
        client.put(1, copies_before(1)[0])
        assert one.held() == {1: [0]}
        with pytest.raises((OSError, RunError, JoinError)):
            KeeperClient(one.address, TOKEN)


def test_closed_keeper_leaves_nothing(keeper: Keeper, client: KeeperClient) -> None:
    client.put(1, copies_before(1)[0])
    keeper.close()
    assert keeper.held() == {}
    assert not [thread for thread in threading.enumerate() if "keeper" in thread.name]
    with pytest.raises(ConnectionError):
        KeeperClient(keeper.address, TOKEN)
