"""A WordPiece tokenizer that is the same in every process.

Training one orders its vocabulary by a hash map's order, which is another one in every process. A
test whose tokens differ from run to run compares other numbers each time.
"""

from tokenizers import BertWordPieceTokenizer

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_pieces(text: str) -> BertWordPieceTokenizer:
    """A tokenizer that knows each word of the text, and each character for other words."""
    words = sorted(set(text.split()))
    characters = sorted(set("".join(words)))
    continued = [f"##{character}" for character in characters]
    pieces = dict.fromkeys([*_SPECIAL, *characters, *continued, *words])
    return BertWordPieceTokenizer(vocab={piece: at for at, piece in enumerate(pieces)})
