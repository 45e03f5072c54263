"""Counts what a reader has to take in: the tokens of Python code."""

import io
import tokenize


def lines_of_tokens(text: str) -> tuple[list[int], list[int]]:
    """The line of each token of code, and of each comment. An f-string is one token, as Python 3.11
    has it; later versions have tokens for its parts.
    """
    code = []
    comments = []
    depth = 0
    for kind, _, start, _, _ in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[kind]
        if name == "FSTRING_START":
            if not depth:
                code.append(start[0])
            depth += 1
        elif name == "FSTRING_END":
            depth -= 1
        elif depth:
            continue
        elif kind in (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING):
            code.append(start[0])
        elif kind == tokenize.COMMENT:
            comments.append(start[0])
    return code, comments
