"""Turns as a model would sample them, written as text."""

import re
from collections.abc import Collection

from jaxrl.chat.tokenizer import Tokenizer


def sampled(tokenizer: Tokenizer, text: str, specials: Collection[str]) -> tuple[int, ...]:
    """Ids of text in which the spellings of these special tokens mean the tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, specials))})", text)
    return tuple(
        i for part in parts for i in ([tokenizer.special(part)] if part in specials else tokenizer.encode(part))
    )
