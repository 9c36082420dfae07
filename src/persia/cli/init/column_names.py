"""Words in the names of columns, and what they say about the values."""

from __future__ import annotations

import keyword
import re

__all__ = ["NUMBER_WORDS", "TEXT_WORDS", "TIME_WORDS", "label_words", "names_an_id", "quoted_column", "words_of"]

_ID_WORDS = {
    "id", "ids", "uid", "pid", "gid", "uuid", "guid", "sku", "isbn", "asin", "code", "zip", "zipcode", "postcode",
    "key", "hash", "user", "item", "product", "article", "movie", "song", "ad", "campaign", "site", "app", "device",
    "category", "cat", "brand", "city", "country", "region", "state", "store", "shop", "group", "class", "pclass",
    "type", "os",
}  # fmt: skip
_ID_LAST_WORDS = {
    "account", "client", "customer", "guest", "hotel", "member", "merchant", "no", "nr", "number", "seller", "session",
    "supplier", "vendor", "visitor",
}  # fmt: skip
"""Words that name ids at the end of a name: `customer` and `customer number`, but not `customer visits`."""
NUMBER_WORDS = {
    "age", "amount", "avg", "average", "balance", "budget", "charges", "count", "cost", "days", "distance", "duration",
    "fare", "gain", "height", "hours", "income", "length", "loss", "mean", "minutes", "months", "num", "number",
    "percent", "pct", "price", "qty", "quantity", "rate", "ratio", "salary", "score", "size", "sum", "tenure", "total",
    "usage", "value", "views", "weight", "width", "years",
}  # fmt: skip
"""Words in the names of quantities."""
TIME_WORDS = {"time", "timestamp", "datetime", "date", "ts", "day", "created", "updated", "at", "ms"}
TEXT_WORDS = {
    "body", "caption", "comment", "content", "description", "headline", "message", "query", "review", "summary", "text",
    "title",
}  # fmt: skip
"""Words in the names of texts that people write."""


def words_of(name: str) -> list[str]:
    """Splits the name of a column into lower-case words; the same for `userId`, `user_id` and `User ID`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", spaced) if word]


def quoted_column(name: str) -> str:
    """Formats a column for an expression of `persia.data`."""
    plain = re.fullmatch(r"[A-Za-z_]\w*", name) and name != "column" and not keyword.iskeyword(name)
    return name if plain else f"column({name!r})"


def label_words(column: str) -> list[str]:
    """Returns the words of a name without the range of values: `Stars (1-5)`, `score/10` and `rating out of 5`."""
    name = re.sub(r"[(\[].*?[)\]]|\bout of\b", " ", column)
    return [word for word in words_of(name) if not word.isdecimal()]


def names_an_id(words: list[str]) -> bool:
    """Whether whole numbers of a column of this name identify something."""
    if not words:
        return False
    if words[-1] in _ID_LAST_WORDS:
        return words not in (["no"], ["nr"], ["number"]) and not set(words[:-1]) & NUMBER_WORDS
    return (words[-1] in _ID_WORDS or words[0] in _ID_WORDS) and not set(words) & NUMBER_WORDS
