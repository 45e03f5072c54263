"""How large a step may be. Every computation of every replica, and every message between replicas,
is an object, in a prediction as in a run: beyond some number the planning alone takes all memory,
or hours. 512 GPUs are within the bounds, however they are divided among stages and replicas.
"""

MAX_STAGES = 4096
MAX_COMPUTATIONS = 1 << 19  # stages x micro-batches x replicas
# Between replicas, of all stages, each times those that share its sender's egress.
MAX_MESSAGE_SHARES = 1 << 28


def too_large(num_stages: int, num_microbatches: int, num_replicas: int = 1) -> str | None:
    """What is too large about a step, for a message; None if it can be planned."""
    if num_stages > MAX_STAGES:
        return f"{num_stages} stages are too many: the most is {MAX_STAGES}"
    count = num_stages * num_microbatches * num_replicas
    if count > MAX_COMPUTATIONS:
        return (
            f"{num_stages} stages x {num_microbatches} micro-batches x {num_replicas} replicas are "
            f"{count} computations a step, too many: the most is {MAX_COMPUTATIONS}"
        )
    return None


def too_many_messages(
    num_stages: int, num_replicas: int, num_parts: int, *, has_server: bool
) -> str | None:
    """What is too large about an exchange between the replicas of each stage."""
    count = num_stages * num_messages(num_replicas, num_parts, has_server=has_server)
    sharing = 1 if has_server else num_replicas
    if count * sharing > MAX_MESSAGE_SHARES:
        return (
            f"{num_replicas} replicas of {num_stages} stages that exchange {num_parts} parts send "
            f"{count} messages a step, too many: the most is {MAX_MESSAGE_SHARES // sharing}"
        )
    return None


def num_messages(num_replicas: int, num_parts: int, *, has_server: bool) -> int:
    """Of one stage's exchange: without a server each replica sends to each other one."""
    receivers = 1 if has_server else num_replicas - 1
    return 2 * num_replicas * receivers * num_parts
