"""Wire formats by name and size, without torch, so that the simulator can use them."""

INT8_BLOCK = 256  # values that share one fp32 scale


def wire_bytes(name: str, num_values: int, value_bytes: int = 4) -> int:
    """Bytes that `num_values` floating-point values of `value_bytes` each take on the wire in
    format `name`.
    """
    match name:
        case "none":
            return num_values * value_bytes
        case "bf16" | "fp16":
            return num_values * 2
        case "int8":
            return num_values + 4 * -(-num_values // INT8_BLOCK)
    raise ValueError(f"unknown wire format {name!r}")
