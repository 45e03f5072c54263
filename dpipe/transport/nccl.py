"""From GPU to GPU by NCCL (through cupy): for GPUs with a fast network or NVLink between them.

    rank 1                                              rank 2
    link 1->2   --wait(mark)--[send]--*  ===========>   *--[recv]--    link 1->2
    link 2->1   --[recv]--*              <===========   --[send]--     link 2->1

Each directed link is a communicator of two ranks with a stream of its own: no link waits for
another, and a receive that is posted early holds up its own link alone. NCCL has no tags; sends and
receives match because both ends run one checked schedule. Each rank needs a GPU of its own.

The host only queues. A watching thread looks for errors: it aborts the links with a peer that is
gone or too late, which ends what the device waits for there, and the next `wait` or `settle` raises
the error. Over a network NCCL notices the death of a peer. Within a machine it may not; then the
coordinator's abort ends the wait.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from threading import Event, Lock, Thread
from typing import Any

import torch

from dpipe.errors import ConfigError, JoinError, PeerLost, TransferTimeout
from dpipe.streams import CudaStreams, Mark, Streams
from dpipe.transport.base import Directory
from dpipe.wire.schema import NCCL_OFFER
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Moved

_CLOSE_S = 5.0  # for the last sends to leave
_WATCH_S = 0.1  # poll interval of the watching thread
_POLL_S = 20e-6  # of a host that waits for the device: at first, then twice as long each time
_POLL_MAX_S = 1e-3
_SOURCE = 0  # the ranks within a link's communicator
_TARGET = 1

Offer = Mapping[int, Sequence[int]]  # by target: the id of the link's communicator


def load_nccl() -> Any:
    """`cupy.cuda.nccl`. Raises `ConfigError` that says what to install."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise ConfigError(
            f'transport.kind = "nccl" needs cupy ({error}): pip install "dpipe[cuda]", or take '
            'transport.kind = "tcp"'
        ) from None
    if not nccl.available:
        raise ConfigError(
            'transport.kind = "nccl": cupy finds no NCCL library; install one, such as pip install '
            "nvidia-nccl-cu13"
        )
    return nccl


class _NcclTransfer:
    """A send or a receive, queued on its link's stream."""

    def __init__(
        self, link: "_NcclLink", what: str, num_bytes: int, start: Mark, end: Mark
    ) -> None:
        self.link = link
        self.what = what
        self.end = end
        self.waited_since: float | None = None
        self._num_bytes = num_bytes
        self._start = start
        self._moved: Moved | None = None

    @property
    def moved(self) -> Moved | None:
        """From when this end was ready: NCCL does not say when the peer was."""
        self.done()
        return self._moved

    def done(self) -> bool:
        streams = self.link.streams
        # An aborted transfer ends on the device as well: after an error no more become done.
        if self._moved is None and self.link.error is None and streams.done(self.end):
            self._moved = Moved(streams.ns(self._start), streams.ns(self.end), self._num_bytes)
        return self._moved is not None

    def settle(self) -> None:
        self.waited_since = self.waited_since or time.monotonic()
        pause_s = _POLL_S
        # Has no deadline of its own: the watching thread breaks the link when the time is up.
        while not self.done():
            self.link.raise_if_broken()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        if self.link.failed:
            self.link.raise_if_broken()


class _NcclSending(_NcclTransfer):
    wait = _NcclTransfer.settle


class _NcclReceiving(_NcclTransfer):
    tensor: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """Let the current stream wait, not the host. Until `settle` has returned, the transfer may
        still fail.
        """
        self.waited_since = time.monotonic()
        if self.link.failed or not self.done():
            self.link.raise_if_broken()
        # Given away: the executor keeps this transfer until the step ends, and not its memory.
        tensor = self.tensor
        self.tensor = None
        assert tensor is not None, "a receive is waited for once"
        self.link.streams.wait(self.end)
        self.link.streams.keep(tensor)
        return tensor


class _NcclLink:
    """One direction between this rank and `peer`; both directions die together."""

    def __init__(
        self, rank: int, peer: int, streams: CudaStreams, byte: int, timeout_s: float
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.streams = streams
        self._byte = byte  # NCCL's number for uint8
        self.error: Exception | None = None
        self.failed = False
        self.communicator: Any = None
        self.stream = streams.stream()
        self.flying: deque[_NcclTransfer] = deque()
        self._timeout_s = timeout_s
        self._head_since = 0.0
        self._lock = Lock()  # guards `error` and `failed`
        self._calling = Lock()  # NCCL must not be called with a communicator that was ended

    def launch(
        self,
        kind: type[_NcclTransfer],
        what: str,
        move: Callable[..., None],
        other: int,
        tensor: torch.Tensor,
    ) -> _NcclTransfer:
        """Queue `move` of the bytes of `tensor` on this link's stream, which is current."""
        start = self.streams.mark()
        with self._calling:
            self.raise_if_broken()
            move(tensor.data_ptr(), tensor.nbytes, self._byte, other, self.stream.cuda_stream)
        transfer = kind(self, what, tensor.nbytes, start, self.streams.mark())
        self.flying.append(transfer)
        return transfer

    def raise_if_broken(self) -> None:
        if self.error is not None:
            raise self.error

    def look(self) -> Exception | None:
        """An error that NCCL reports, or of a transfer that is waited for too long; else None."""
        now = time.monotonic()
        while self.flying and self.flying[0].done():
            self.flying.popleft()
            self._head_since = now
        try:
            with self._calling:
                if self.error is None:
                    self.communicator.check_async_error()
        except Exception as error:  # NcclError, or KeyError for a code that cupy has no name for
            return PeerLost(f"rank {self.rank} lost rank {self.peer}: {error!r}")
        head = self.flying[0] if self.flying else None
        if head is None or head.waited_since is None:
            return None
        # From when it was the first on its stream: those before it have had deadlines of their own.
        if now - max(head.waited_since, self._head_since) < self._timeout_s:
            return None
        return TransferTimeout(
            f"rank {self.rank} has waited {self._timeout_s:g} s {head.what} rank {self.peer}; the "
            "peer is slower or the network worse than timeouts.transfer allows, or the peer waits "
            "for something else"
        )

    def break_off(self, error: Exception, *, failed: bool = False) -> None:
        """End the link, and with it what the device waits for there."""
        with self._lock:
            first = self.error is None
            if first or failed:
                self.error = error
                self.failed = failed
        if first and self.communicator is not None:
            self._end(self.communicator.abort)

    def close(self) -> None:
        """May wait for the peer to close as well; NCCL has no deadline for that."""
        with self._lock:
            first = self.error is None
            self.error = self.error or PeerLost(
                f"rank {self.rank} has closed its link with rank {self.peer}"
            )
        if first and self.communicator is not None:
            # `destroy` waits for what is queued, and a peer that is gone would never take it.
            idle = all(self.streams.done(transfer.end) for transfer in self.flying)
            self._end(self.communicator.destroy if idle else self.communicator.abort)

    def _end(self, how: Callable[[], None]) -> None:
        """After a call that is under way; but a call that the device's full queue blocks ends only
        by this, so that the wait is bounded.
        """
        waited = self._calling.acquire(timeout=_CLOSE_S)
        try:
            how()
        finally:
            if waited:
                self._calling.release()


def make(
    rank: int,
    *,
    streams: Streams,
    transfer_timeout_s: float,
    connect_timeout_s: float,
    **_of_sockets: object,
) -> "NcclTransport":
    """For `kinds.TRANSPORTS`; ports, tokens and buffers are of sockets."""
    assert isinstance(streams, CudaStreams), "the configuration says that the device is a GPU"
    return NcclTransport(
        rank,
        streams,
        transfer_timeout_s=transfer_timeout_s,
        connect_timeout_s=connect_timeout_s,
    )


def refuse_shared_gpus(gpus: Sequence[str]) -> None:
    """Raises `ConfigError` naming ranks that have one GPU; `gpus` are their UUIDs, by rank."""
    for rank, gpu in enumerate(gpus):
        if gpus.index(gpu) < rank:
            raise ConfigError(
                f"ranks {gpus.index(gpu)} and {rank} share the GPU {gpu}, and NCCL needs one for "
                'each rank; set node.device to another, or take transport.kind = "tcp"'
            )


def _nothing(pointer: int, num_bytes: int, byte: int, other: int, stream: int) -> None:
    """Takes the place of a communicator's call in a rehearsal."""


class NcclTransport:
    """Opened in two steps, since one end makes the id of a link's communicator:

    transport = NcclTransport(rank, streams)
    transport.connect({rank: offer of every rank})     what `transport.offer(peers)` gave on each

    The second step opens each link and sends a byte through it. All ranks open links in the same
    order, so that no two wait for each other.
    """

    port = 0  # nothing listens: NCCL connects by itself

    def __init__(
        self,
        rank: int,
        streams: CudaStreams,
        *,
        transfer_timeout_s: float = 300.0,
        connect_timeout_s: float = 20.0,
        nccl: Any = None,
    ) -> None:
        self.rank = rank
        self._streams = streams
        self._transfer_timeout_s = transfer_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._nccl = nccl or load_nccl()
        self._links: dict[tuple[int, int], _NcclLink] = {}  # by source and target
        self._failing = Lock()  # guards `_failed`: an abort may come before there are links
        self._failed: Exception | None = None
        self._opened = Event()  # all links are open, or the attempt has failed
        self._stopping = Event()
        self._closing = Lock()  # a second call waits for the first
        self._rehearses = False
        self._watcher = Thread(target=self._watch, name=f"dpipe-nccl-{rank}", daemon=True)
        self._opening: tuple[int, int] | None = None
        self._id_type: Callable[[Sequence[int]], Any] = bytes

    @property
    def gpu(self) -> str:
        """The GPU's UUID."""
        return self._streams.gpu

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        """Share this rank's GPU and the ids of the links from it, then connect. Raises
        `ConfigError` where two ranks have one GPU.
        """
        own = [self.gpu, list(self.offer(peers).items())]
        by_rank = directory.share("nccl", own, self._connect_timeout_s, NCCL_OFFER)
        refuse_shared_gpus([gpu for gpu, _ in by_rank])
        self.connect({rank: dict(offer) for rank, (_, offer) in enumerate(by_rank)})

    def offer(self, peers: Collection[int]) -> dict[int, list[int]]:
        """The ids of the communicators of the links from this rank, by target."""
        offer = {}
        for peer in peers:
            unique_id = self._nccl.get_unique_id()
            self._id_type = type(unique_id)  # bytes since cupy 14, a tuple before
            offer[peer] = list(unique_id)
        return offer

    def connect(self, offers: Mapping[int, Offer]) -> None:
        """Open and check every link from and to this rank. Raises `JoinError` naming the peer that
        does not answer, or the error that this rank was told to `fail` with, before or meanwhile.
        """
        self._raise_if_failed()
        pairs = sorted((source, target) for source, offer in offers.items() for target in offer)
        mine = [pair for pair in pairs if self.rank in pair]
        errors: list[Exception] = []
        opener = Thread(
            target=self._open_all,
            args=(mine, offers, errors),
            name=f"dpipe-nccl-open-{self.rank}",
            daemon=True,
        )
        opener.start()
        in_time = self._opened.wait(self._connect_timeout_s)
        self._raise_if_failed()
        if errors or not in_time:
            assert self._opening is not None
            (peer,) = set(self._opening) - {self.rank}
            why = errors[0] if errors else f"no answer within {self._connect_timeout_s:g} s"
            raise JoinError(
                f"rank {self.rank} cannot open its NCCL link with rank {peer}: {why}; each rank "
                "needs a GPU of its own and a network that NCCL can use (NCCL_SOCKET_IFNAME names "
                "the interface, NCCL_DEBUG=INFO says more); between regions take "
                'transport.kind = "tcp" or "grpc"'
            )
        self._watcher.start()

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> _NcclSending:
        link = self._links[self.rank, peer]
        link.raise_if_broken()
        tensor = tensor.detach().contiguous()
        ready = self._streams.mark()
        with self._streams.on(link.stream):
            self._streams.wait(ready)
            self._streams.keep(tensor)
            what = f"to hand over {tag} to"
            move = _nothing if self._rehearses else link.communicator.send
            sending = link.launch(_NcclSending, what, move, _TARGET, tensor)
        assert isinstance(sending, _NcclSending)
        return sending

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> _NcclReceiving:
        assert into is None, "NCCL receives into the memory of a GPU"
        link = self._links[peer, self.rank]
        link.raise_if_broken()
        # Allocated on the link's stream: the memory is free there when the receive begins.
        with self._streams.on(link.stream):
            tensor = like.empty(self._streams.device)
            move = link.communicator.recv
            if self._rehearses:
                tensor.zero_()
                move = _nothing
            receiving = link.launch(_NcclReceiving, f"for {tag} from", move, _SOURCE, tensor)
        assert isinstance(receiving, _NcclReceiving)
        receiving.tensor = tensor
        return receiving

    def rehearse(self, step: Callable[[], None]) -> None:
        """Run `step` with sends and receives that allocate and queue as ever, but move nothing:
        zeros arrive.

        An early receive of NCCL is a kernel that runs until the peer sends. What CUDA does for the
        first time meanwhile (load a kernel, allocate memory) may wait for that kernel, and the peer
        for what comes behind it.
        """
        self._rehearses = True
        try:
            step()
        finally:
            self._rehearses = False

    def fail(self, error: Exception) -> None:
        """As the contract says; `connect` raises `error` too. Over a network NCCL tells peers."""
        with self._failing:  # `_keep` takes no more links from here on
            self._failed = error
        self._opened.set()
        for link in self._links.values():
            link.break_off(error, failed=True)

    def close(self) -> None:
        with self._closing:
            self._drain(time.monotonic() + _CLOSE_S)
            self._stopping.set()
            if self._watcher.is_alive():
                self._watcher.join(_CLOSE_S)
            closer = Thread(
                target=self._close_links, name=f"dpipe-nccl-close-{self.rank}", daemon=True
            )
            closer.start()
            closer.join(_CLOSE_S)

    def _drain(self, deadline: float) -> None:
        """Wait until what was sent has left."""
        for (source, _), link in self._links.items():
            if source != self.rank or link.error is not None:
                continue
            for transfer in tuple(link.flying):
                with suppress(TimeoutError):
                    self._streams.block(transfer.end, max(0.0, deadline - time.monotonic()))

    def _close_links(self) -> None:
        """In the order in which all ranks opened them."""
        for link in self._links.values():
            link.close()

    def _open_all(
        self, pairs: Sequence[tuple[int, int]], offers: Mapping[int, Offer], errors: list[Exception]
    ) -> None:
        """Open the links one after another; in a thread, since NCCL has no deadline for it."""
        try:
            for source, target in pairs:
                self._raise_if_failed()
                self._opening = source, target
                peer = target if source == self.rank else source
                link = _NcclLink(
                    self.rank, peer, self._streams, self._nccl.NCCL_UINT8, self._transfer_timeout_s
                )
                end = _SOURCE if source == self.rank else _TARGET
                with self._streams.on(link.stream):
                    unique_id = self._id_type(offers[source][target])
                    link.communicator = self._nccl.NcclCommunicator(2, unique_id, end)
                self._keep(source, target, link)
                self._check(link, end)
        except Exception as error:
            errors.append(error)
        finally:
            self._opened.set()

    def _keep(self, source: int, target: int, link: _NcclLink) -> None:
        """Keep a link that is open; where this rank has failed meanwhile, end it and raise."""
        with self._failing:
            if self._failed is None:
                self._links[source, target] = link
                return
        link.break_off(self._failed, failed=True)
        raise self._failed

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _check(self, link: _NcclLink, end: int) -> None:
        """Send one byte: NCCL connects at the first use, which must not be in the first step."""
        with self._streams.on(link.stream):
            byte = torch.zeros(1, dtype=torch.uint8, device=self._streams.device)
            move = link.communicator.send if end == _SOURCE else link.communicator.recv
            transfer = link.launch(_NcclTransfer, "for a first byte with", move, 1 - end, byte)
        self._streams.block(transfer.end, self._connect_timeout_s)

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            for link in tuple(self._links.values()):
                if link.error is None and (error := link.look()) is not None:
                    self._break_off_peer(link.peer, error)

    def _break_off_peer(self, peer: int, error: Exception) -> None:
        # Both directions: a rank that cannot hear a peer must not go on waiting to be heard.
        for link in self._links.values():
            if link.peer == peer:
                link.break_off(error)
