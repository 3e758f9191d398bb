"""Token ids to text, one at a time, never a part of a character."""

import codecs

from ninfer.frontend.tokenizer import Tokenizer


class Detokenizer:
    """Assembles the bytes of a token stream to text.

    Ill-formed bytes become U+FFFD, one for each maximal subpart of a character, as in Unicode's
    recommendation. Special tokens yield nothing unless `keep_special`.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The characters that this token completes, maybe none."""
        data = self._tokenizer.token_bytes(token_id)
        if not self._keep_special and self._tokenizer.is_special(token_id):
            return ""
        if data.isascii() and not self._decoder.getstate()[0]:
            return data.decode("ascii")  # the usual case, at a fraction of the time
        return self._decoder.decode(data)

    def close(self) -> str:
        """What an unfinished character at the end amounts to: U+FFFD or nothing."""
        return self._decoder.decode(b"", final=True)
