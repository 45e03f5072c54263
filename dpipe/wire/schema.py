"""The shapes of JSON values from another machine. Each is checked before anything looks into it, so
that a rank which sends another shape is named, and no code behind meets a type it does not expect.
"""

from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dpipe.errors import TransferError
from dpipe.wire.text import visible

T = TypeVar("T")

_ERRORS_READ = 1000  # of a value; of more only the number is said
_REASON_CHARACTERS = 200

# Made visible where it enters: whoever logs it later need not think of it.
Text = Annotated[str, Field(max_length=1000), AfterValidator(visible)]
Port = Annotated[int, Field(ge=0, le=65535)]
Count = Annotated[int, Field(ge=0, le=2**53)]
# Of an NCCL communicator; its bytes are signed in older versions of cupy.
UniqueId = Annotated[
    list[Annotated[int, Field(ge=-128, le=255)]], Field(min_length=1, max_length=1024)
]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Shape(BaseModel):
    """A JSON object with these keys and no others."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Schema(Generic[T]):
    """JSON texts of the type `shape`, as pydantic reads it; strictly: 1 is no "1", and no true."""

    def __init__(self, shape: Any) -> None:
        self._adapter: TypeAdapter[T] = TypeAdapter(shape)

    def read(self, payload: bytes) -> T:
        """Raises `ValueError` with a line about another shape."""
        try:
            return self._adapter.validate_json(payload, strict=True)
        except ValidationError as error:
            raise ValueError(_first(error)) from None

    def parse(self, payload: bytes, what: str, rank: int) -> T:
        """Raises `TransferError` naming the `rank` that sent another shape, and `what` it is of."""
        try:
            return self.read(payload)
        except ValueError as error:
            raise TransferError(
                f"rank {rank} sent {len(payload)} bytes for {what} that do not belong there "
                f"({error}); install one dpipe version everywhere"
            ) from None


# A GPU's UUID, and the unique id of the link to each target.
NCCL_OFFER = Schema[tuple[str, list[tuple[int, list[int]]]]](
    tuple[Text, list[tuple[Count, UniqueId]]]
)


def _first(error: ValidationError) -> str:
    if error.error_count() > _ERRORS_READ:
        return f"{error.error_count()} errors"
    # Without the input, which somebody else wrote, and which may be as large as a message.
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(map(_in_a_line, first["loc"]))[:_REASON_CHARACTERS]
    reason = first["msg"][:_REASON_CHARACTERS]
    return visible(f"{where}: {reason}" if where else reason)


def _in_a_line(key: int | str) -> str:
    text = str(key)
    # A key of an object is somebody else's text, and `visible` would keep its line breaks.
    return text if text.isprintable() else ascii(text)[1:-1]
