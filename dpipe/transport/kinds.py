"""`TRANSPORTS`: what carries tensors between ranks. Declared here once, without torch."""

from dataclasses import dataclass

from dpipe.choices import Choices, function_at


@dataclass(frozen=True)
class TransportKind:
    name: str  # in configuration files
    make: str  # "package.module:function" that takes what `mesh.Mesh` does; gives a `Transport`
    between_gpus: bool = False  # moves tensors on CUDA GPUs and no others; each rank needs its own
    can_be_shaped: bool = True  # works behind transport.shape
    between_replicas: bool = True  # also carries the replicas' exchange of gradients
    sets_congestion_control: bool = False  # opens its sockets itself, and can set their options
    requires: str | None = None  # function that raises `ConfigError` where a library is missing

    def check(self) -> None:
        """Raises `ConfigError` where something that it needs is not installed."""
        if self.requires is not None:
            function_at(self.requires)()


TRANSPORTS: Choices[TransportKind] = Choices(
    "transport.kind",
    TransportKind("grpc", "dpipe.transport.grpc:GrpcTransport"),
    TransportKind("tcp", "dpipe.transport.tcp:TcpTransport", sets_congestion_control=True),
    TransportKind(
        "nccl",
        "dpipe.transport.nccl:make",
        between_gpus=True,
        can_be_shaped=False,  # its bytes never come through the host, where a shaper holds them
        between_replicas=False,  # replicas add in host memory; on GPUs torch's own group does it
        requires="dpipe.transport.nccl:load_nccl",
    ),
)
