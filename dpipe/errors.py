"""The exceptions: what the user can mend before a run, and what ends a run.

DpipeError
├── InputError            the input cannot work; exit code 2, nothing was written
│   ├── ConfigError       an unknown key, a value out of range, sizes that do not fit each other
│   ├── ScheduleError     a schedule that is incomplete, out of order, or cannot make progress
│   ├── ProfileError      a network profile that cannot be read
│   ├── DataError         text that is missing, too short or not UTF-8; a tokenizer that cannot be
│   │                     used with it
│   ├── CheckpointError   a checkpoint that is missing, partial or corrupt
│   └── JoinError         the ranks cannot connect: port in use, nobody there, wrong token, or
│                         another configuration
└── RunError              a run that had started cannot go on; exit code 1
    ├── PeerLost          the other end of a link is gone
    ├── TransferError     what arrived is not what this end expects: tag, shape, number of bytes
    ├── TransferTimeout   a transfer took longer than its deadline
    ├── TermLost          another process coordinates the run by now
    ├── RunAborted        another rank failed or was lost; the message names it
    └── NumericError      a loss or a gradient that is not finite
"""


class DpipeError(Exception):
    """The base of every error that dpipe raises on purpose."""

    exit_code = 1


class InputError(DpipeError):
    """The user's input cannot work; the message says what to change."""

    exit_code = 2


class ConfigError(InputError):
    pass


class ScheduleError(InputError):
    pass


class ProfileError(InputError):
    pass


class DataError(InputError):
    pass


class CheckpointError(InputError):
    pass


class JoinError(InputError):
    pass


class RunError(DpipeError):
    """A run that had started cannot go on."""


class PeerLost(RunError):  # noqa: N818 - the contract's word (DESIGN): what happened, not that it is an error
    pass


class TransferError(RunError):
    pass


class TransferTimeout(RunError):  # noqa: N818
    pass


class TermLost(RunError):  # noqa: N818
    pass


class RunAborted(RunError):  # noqa: N818
    pass


class NumericError(RunError):
    pass
