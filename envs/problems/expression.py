r"""An expression in TeX or plain text, read into a tree: numbers, fractions, powers, roots, functions, symbols.

Knows notation and limits; it must not know what anything is worth. Nothing is evaluated, so reading 9^{9^{9}} is cheap.
Text over a limit, or that is no expression, is `Unreadable`: a plain outcome for the caller, not an error of anyone's.

Digits are 0-9: digits of other scripts are no numbers. Functions take (x), {x} or the product that follows them; a
command takes what TeX gives it (\frac12 is one half, \sqrt23 is 3\sqrt2); -2^2 is -4; 1/2x is x/2; a whole number in
front of a proper fraction is a mixed number (1\frac12, 1 1/2).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH, MAX_TOKENS, MAX_DEPTH, MAX_DIGITS = 1000, 300, 24, 400

_FUNCTIONS = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln log"
_LETTERS_OF_TEX = """alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho
    sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega infty ell"""
_CALLS, _NAMES = frozenset(_FUNCTIONS.split()), frozenset(_LETTERS_OF_TEX.split())
_PLAIN_WORDS = _CALLS | {"pi", "sqrt"}
_LONGEST_PRODUCT = 3  # "xyz" is a product; longer runs of letters are words


class Unreadable(ValueError):
    """The text is no expression, or one over a limit; the message says which."""


@dataclass(frozen=True)
class Node:
    """One operation on `args`, or a leaf: op "number" with a Fraction, "symbol" with a name. "call" has a name too.

    Operations: add, mul, div, pow (two args each), neg (one), mixed (whole and fraction), call (any).
    """

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | str | None = None


def number(value: Fraction | int) -> Node:
    """A leaf that is a number."""
    return Node("number", value=Fraction(value))


def symbol(name: str) -> Node:
    """A leaf that is a name."""
    return Node("symbol", value=name)


def call(name: str, *args: Node) -> Node:
    """A function by name; "root" is (radicand, index), "log" is (x) or (x, base)."""
    return Node("call", args, name)


def read_expression(text: str) -> Node:
    """The tree of `text`. Unreadable when it is none."""
    if len(text) > MAX_LENGTH:
        raise Unreadable(f"{len(text)} characters; at most {MAX_LENGTH} are read")
    tokens = list(_tokens(text))
    if len(tokens) > MAX_TOKENS:
        raise Unreadable(f"{len(tokens)} tokens; at most {MAX_TOKENS} are read")
    cursor = _Cursor(tokens)
    node = _sum(cursor)
    if cursor.token is not None:
        raise Unreadable(f"{cursor.token.text!r} is not expected there")
    return node


# --- tokens ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str


_TOKEN = re.compile(
    r"""(?P<repeating>[0-9]*\.[0-9]*\\overline\{[0-9]+\})
      | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z.]))?)
      | (?P<command>\\[A-Za-z]+)
      | (?P<word>[A-Za-z]+)
      | (?P<sign>\*\*|[-+*/^!()\[\]{}|_])
      | (?P<space>\s+)""",
    re.VERBOSE,
)


def _tokens(text: str) -> Iterator[_Token]:
    place = 0
    while place < len(text):
        found = _TOKEN.match(text, place)
        if not found:
            raise Unreadable(f"{text[place]!r} belongs to no expression")
        place = found.end()
        yield from _SPLIT.get(str(found.lastgroup), _as_it_is)(str(found.lastgroup), found[0])


def _as_it_is(kind: str, text: str) -> Iterator[_Token]:
    if kind == "number" and sum(map(str.isdigit, text)) > MAX_DIGITS:
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    yield _Token(kind, "^" if text == "**" else text)


def _command(kind: str, text: str) -> Iterator[_Token]:
    name = text[1:]
    yield _Token("name", name) if name in _NAMES else _Token("command", name)


def _letters(kind: str, text: str) -> Iterator[_Token]:
    if text in _PLAIN_WORDS:
        yield _Token("name" if text == "pi" else "command", text)
        return
    if len(text) > _LONGEST_PRODUCT:
        raise Unreadable(f"{text!r} is a word")
    yield from (_Token("name", letter) for letter in text)


_SPLIT: Mapping[str, Callable[[str, str], Iterator[_Token]]] = {
    "command": _command,
    "word": _letters,
    "space": lambda kind, text: iter(()),
}


@dataclass
class _Cursor:
    """The tokens and how far they are read; how deep the expression is at this place."""

    tokens: list[_Token]
    place: int = 0
    depth: int = 0

    @property
    def token(self) -> _Token | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def next_is(self, *texts: str, kind: str = "sign") -> bool:
        token = self.token
        return token is not None and token.kind == kind and (not texts or token.text in texts)

    def take(self) -> _Token:
        token = self.token
        if token is None:
            raise Unreadable("it ends too soon")
        self.place += 1
        return token

    def expect(self, text: str) -> None:
        token = self.take()
        if (token.kind, token.text) != ("sign", text):
            raise Unreadable(f"{token.text!r} stands where {text!r} should")

    def nested(self, read: Callable[["_Cursor"], Node]) -> Node:
        if self.depth == MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
        self.depth += 1
        node = read(self)
        self.depth -= 1
        return node


# --- grammar --------------------------------------------------------------------------------------


def _sum(cursor: _Cursor) -> Node:
    node = _product(cursor)
    while cursor.next_is("+", "-"):
        minus = cursor.take().text == "-"
        term = _product(cursor)
        node = Node("add", (node, Node("neg", (term,)) if minus else term))
    return node


_TIMES = frozenset({"cdot", "times", "ast"})


def _product(cursor: _Cursor) -> Node:
    node = _signed(cursor)
    while True:
        if cursor.next_is("*") or cursor.next_is(*_TIMES, kind="command"):
            cursor.take()
            node = Node("mul", (node, _signed(cursor)))
        elif cursor.next_is("/") or cursor.next_is("div", kind="command"):
            cursor.take()
            node = Node("div", (node, _signed(cursor)))
        elif _begins_factor(cursor):
            node = Node("mul", (node, _power(cursor)))
        else:
            return node


def _begins_factor(cursor: _Cursor) -> bool:
    """Whether what follows is multiplied without a sign: anything but a number, which would have run together."""
    command = cursor.next_is(kind="command") and not cursor.next_is(*_TIMES, "div", kind="command")
    return cursor.next_is("(", "[", "{") or cursor.next_is(kind="name") or command


def _signed(cursor: _Cursor) -> Node:
    if not cursor.next_is("+", "-"):
        return _power(cursor)
    minus = cursor.take().text == "-"
    node = cursor.nested(_signed)
    return Node("neg", (node,)) if minus else node


def _power(cursor: _Cursor) -> Node:
    node = _postfix(cursor)
    if not cursor.next_is("^"):
        return node
    cursor.take()
    if _is_circle(cursor):
        return _postfixed(cursor, call("degrees", node))
    return _postfixed(cursor, Node("pow", (node, _exponent(cursor))))


def _exponent(cursor: _Cursor) -> Node:
    if cursor.next_is("{"):
        return _group(cursor)
    return cursor.nested(_signed)  # so 2^-3 and the tower 2^3^2 are read


def _is_circle(cursor: _Cursor) -> bool:
    """Skip the circle that stands for degrees, if it is there, in braces or not."""
    texts = [token.text for token in cursor.tokens[cursor.place : cursor.place + 3]]
    for circle in (["circ"], ["{", "circ", "}"]):
        if texts[: len(circle)] == circle:
            cursor.place += len(circle)
            return True
    return False


def _postfix(cursor: _Cursor) -> Node:
    return _postfixed(cursor, _atom(cursor))


def _postfixed(cursor: _Cursor, node: Node) -> Node:
    while cursor.next_is("!"):
        cursor.take()
        node = call("factorial", node)
    return node


def _atom(cursor: _Cursor) -> Node:
    token = cursor.take()
    read = _ATOMS.get(token.kind) or _ATOMS.get(token.text)
    if read is None:
        raise Unreadable(f"{token.text!r} is not expected there")
    return read(cursor, token)


def _number(cursor: _Cursor, token: _Token) -> Node:
    if cursor.next_is("_"):
        return symbol(token.text + _subscript(cursor))  # a numeral in another base: its digits are not its value
    value = Fraction(token.text.rstrip("."))
    if not token.text.isdigit():
        return number(value)
    fraction = _plain_fraction(cursor) or _tex_fraction(cursor)
    return Node("mixed", (number(value), fraction)) if fraction else number(value)


def _plain_fraction(cursor: _Cursor) -> Node | None:
    """The 1/2 of "1 1/2"."""
    ahead = cursor.tokens[cursor.place : cursor.place + 3]
    if [t.kind for t in ahead] != ["number", "sign", "number"] or ahead[1].text != "/":
        return None
    return _proper(cursor, ahead[0].text, ahead[2].text, 3)


def _tex_fraction(cursor: _Cursor) -> Node | None:
    r"""The \frac{1}{2} of 1\frac{1}{2}, and the \frac12 of 1\frac12."""
    ahead = [t.text for t in cursor.tokens[cursor.place : cursor.place + 7]]
    if ahead[:1] != ["frac"]:
        return None
    if len(ahead) == 7 and (ahead[1], ahead[3], ahead[4], ahead[6]) == ("{", "}", "{", "}"):
        return _proper(cursor, ahead[2], ahead[5], 7)
    short = ahead[1] if len(ahead) > 1 else ""
    return _proper(cursor, short[0], short[1], 2) if len(short) == 2 and short.isdigit() else None


def _proper(cursor: _Cursor, over: str, under: str, tokens: int) -> Node | None:
    if not (over.isdigit() and under.isdigit() and int(over) < int(under)):
        return None
    cursor.place += tokens
    return Node("div", (number(int(over)), number(int(under))))


def _repeating(cursor: _Cursor, token: _Token) -> Node:
    fixed, _, period = token.text.removesuffix("}").partition("\\overline{")
    if len(fixed) + len(period) > MAX_DIGITS:
        raise Unreadable(f"a number of more than {MAX_DIGITS} digits")
    places = len(fixed.partition(".")[2])
    head = Fraction(int("0" + fixed.replace(".", "")), 10**places)
    return number(head + Fraction(int(period), (10 ** len(period) - 1) * 10**places))


def _name(cursor: _Cursor, token: _Token) -> Node:
    return symbol(token.text + (_subscript(cursor) if cursor.next_is("_") else ""))


def _subscript(cursor: _Cursor) -> str:
    cursor.expect("_")
    if not cursor.next_is("{"):
        return f"_{cursor.take().text}"
    cursor.take()
    inside = []
    while not cursor.next_is("}"):
        inside.append(cursor.take().text)
    cursor.take()
    return f"_{''.join(inside)}"


def _closed_by(closing: str) -> Callable[[_Cursor, _Token], Node]:
    def read(cursor: _Cursor, token: _Token) -> Node:
        node = cursor.nested(_sum)
        cursor.expect(closing)
        return call("abs", node) if closing == "|" else node

    return read


def _group(cursor: _Cursor) -> Node:
    cursor.expect("{")
    return _closed_by("}")(cursor, _Token("sign", "{"))


def _argument(cursor: _Cursor) -> Node:
    """What a TeX command takes: a group, or else one token, of a number one digit."""
    if cursor.next_is("{"):
        return _group(cursor)
    token = cursor.token
    if token is not None and token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
        cursor.tokens[cursor.place] = _Token("number", token.text[1:])
        return number(int(token.text[0]))
    if token is not None and token.kind == "number":
        return number(Fraction(cursor.take().text.rstrip(".")))
    return cursor.nested(_atom)


def _written_command(cursor: _Cursor, token: _Token) -> Node:
    read = _COMMANDS.get(token.text)
    if read is None and token.text not in _CALLS:
        raise Unreadable(f"\\{token.text} is not read")
    return read(cursor) if read else _function(cursor, token.text)


def _fraction(cursor: _Cursor) -> Node:
    over = _argument(cursor)
    return Node("div", (over, _argument(cursor)))


def _binomial(cursor: _Cursor) -> Node:
    above = _argument(cursor)
    return call("binom", above, _argument(cursor))


def _root(cursor: _Cursor) -> Node:
    if cursor.next_is("("):
        return call("root", _atom(cursor), number(2))
    index = _atom(cursor) if cursor.next_is("[") else number(2)
    return call("root", _argument(cursor), index)


def _function(cursor: _Cursor, name: str) -> Node:
    r"""\sin x, \sin^2 x, \sin(x), \log_2 8."""
    below = power = None
    if name == "log" and cursor.next_is("_"):
        cursor.take()
        below = _argument(cursor)
    if cursor.next_is("^"):
        cursor.take()
        power = _argument(cursor)
    x = cursor.nested(_function_argument)
    node = call(name, x, below) if below else call(name, x)
    return Node("pow", (node, power)) if power else node


def _function_argument(cursor: _Cursor) -> Node:
    if cursor.next_is("(", "{"):
        return _power(cursor)
    node = _signed(cursor)
    while cursor.next_is(kind="name") or cursor.next_is("frac", "sqrt", kind="command"):
        node = Node("mul", (node, _power(cursor)))
    return node


_COMMANDS: Mapping[str, Callable[[_Cursor], Node]] = {"frac": _fraction, "binom": _binomial, "sqrt": _root}
_ATOMS: Mapping[str, Callable[[_Cursor, _Token], Node]] = {
    "number": _number,
    "repeating": _repeating,
    "name": _name,
    "command": _written_command,
    "(": _closed_by(")"),
    "[": _closed_by("]"),
    "{": _closed_by("}"),
    "|": _closed_by("|"),
}
