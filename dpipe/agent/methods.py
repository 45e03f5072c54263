"""What a coordinator answers over gRPC: the agents' streams, and single questions."""

import json
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import grpc

from dpipe.elastic.messages import (
    JOB_METHOD,
    LEAVE_REQUEST,
    METHOD,
    RELEASE_METHOD,
    STATUS_METHOD,
    STATUS_REQUEST,
    JobOffer,
    LeaveRequest,
)
from dpipe.elastic.servers import SERVER_METHOD, SERVER_MOVED, ServerMoved, ServersKnown


class Answering(Protocol):
    """Of `server.ElasticServer`."""

    def attend(
        self, incoming: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]: ...

    def offer(self) -> JobOffer: ...
    def status(self, rows_from: int | None) -> dict[str, Any]: ...
    def let_go(self, request: LeaveRequest) -> int: ...
    def move_server(self, message: ServerMoved) -> ServersKnown: ...


def handler_of(server: Answering) -> grpc.GenericRpcHandler:
    def offer(request: bytes) -> bytes:
        return server.offer().model_dump_json().encode()

    def status(request: bytes) -> bytes:
        asked = STATUS_REQUEST.read(request or b"{}")
        return json.dumps(server.status(asked.rows_from)).encode()

    def let_go(request: bytes) -> bytes:
        return json.dumps(server.let_go(LEAVE_REQUEST.read(request))).encode()

    def move(request: bytes) -> bytes:
        return server.move_server(SERVER_MOVED.read(request)).model_dump_json().encode()

    service, _, attend = METHOD.removeprefix("/").partition("/")
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        attend: grpc.stream_stream_rpc_method_handler(server.attend),
    }
    answers = {
        JOB_METHOD: offer,
        STATUS_METHOD: status,
        RELEASE_METHOD: let_go,
        SERVER_METHOD: move,
    }
    for method, answer in answers.items():
        name = method.rpartition("/")[2]
        methods[name] = grpc.unary_unary_rpc_method_handler(_checked(answer))
    return grpc.method_handlers_generic_handler(service, methods)


def _checked(answer: Callable[[bytes], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """A question that cannot be read is refused with the reason."""

    def call(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return answer(request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    return call
