r"""When two answers are the same answer: numbers by exact value, tuples, intervals and sets by their elements, words.

Knows notation, expressions and exact values; it must not know where in a response the answer stood, nor any question.
`equal` is reflexive (but for blank text) and symmetric. `judge` is what rewards are made of, and not symmetric: when
the reference is a number, the answer has to be a number written out, so that repeating the question's own expression
("2^{10}" for 1024, "6/3" for 2) earns nothing; a fraction need not be in lowest terms.

    50\% is the same as 50 and as 0.5. A unit, a currency, words behind a number count for nothing on one side alone;
    two that both say what the other does not differ ("5 cm", "5 m"; "5 cups", "5 gallons"). "2 million" is 2000000.
    5 m is a product, but an answer in meters where the reference is a number.
    (1,2) is a pair, [1,2) an interval; order counts. {1,2}, "1, 2", "1 or 2", "x=1, x=2" and 1.5 \pm 0.5 are sets.
    x = 5 is the same as 5, and not as y = 5.
    A decimal is the number it spells: 0.33 is not 1/3. A numeral with a base is that numeral: 11_2 is not 3.

Nothing here raises on any text, and the time is bounded: by the length of what is read and by `Work`. Where exact
arithmetic cannot decide, the verdict is "not equal" and holds the pairs in question, for who can (symbolic.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from envs.problems.exact import Undecided, Value, Work, evaluate, same
from envs.problems.expression import MAX_LENGTH, Node, Unreadable, number, read_expression
from envs.problems.notation import THOUSANDS, Quantity, clean, quantity, quantity_of_letters

MAX_ITEMS, MAX_NESTING = 24, 6

Pair = tuple[Node, Node]


@dataclass(frozen=True)
class Verdict:
    """Whether two answers are the same, and why. `undecided`: pairs of expressions that might yet be equal."""

    equal: bool
    reason: str
    undecided: tuple[Pair, ...] = ()


# --- what an answer is ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scalar:
    """One expression. `value` is None where exact arithmetic has none; then `reason` says why.

    in_units: the number that it is when its letters are those of a unit.
    """

    node: Node
    value: Value | None
    reason: str
    percent: bool
    unit: frozenset[str]
    in_units: "Scalar | None" = None


@dataclass(frozen=True)
class Words:
    """Text that is no expression, in one spelling."""

    text: str


@dataclass(frozen=True)
class Collection:
    """Several answers. kind: the brackets around them, or "set", "union", "matrix", "row", "equation"."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Named:
    """An answer with the name it is given: x = 5."""

    name: str
    answer: "Answer"


Answer = Scalar | Words | Collection | Named

_UNORDERED = frozenset({"set", "union", "equation"})


def read_answer(text: str, work: Work) -> Answer:
    """What `text` means. Never raises; what is no expression, or too long for one, is `Words`."""
    if len(text) > MAX_LENGTH:
        return Words(" ".join(text.split()))
    return _read(_join_thousands(clean(text)), work, 0)


def _read(text: str, work: Work, nesting: int) -> Answer:
    text = text.strip().rstrip(",;. ")
    if nesting > MAX_NESTING:
        return Words(text)
    for part in (_matrix, _list, _membership, _plus_minus, _equation, _union, _bracketed, _quoted):
        found = part(text, work, nesting + 1)
        if found is not None:
            return found
    return _scalar(text, work)


_OPEN, _CLOSE = re.compile(r"\\\{|[(\[{]"), re.compile(r"\\\}|[)\]}]")
_SPLITS: Mapping[str, re.Pattern[str]] = {
    "list": re.compile(r'[,;]|"\s*(?:or|and)\s*"|(?<![A-Za-z"])(?:or|and)(?![A-Za-z"])'),
    "union": re.compile(r"\\cup(?![A-Za-z])"),
    "equation": re.compile(r"(?<![<>!:])=(?!=)"),
    "row": re.compile(r"\\cr(?![A-Za-z])"),
    "cell": re.compile(r"&"),
}


def _split(text: str, by: str) -> list[str]:
    """`text` cut where a separator stands outside of all brackets."""
    cuts = {m.start(): m.end() for m in _SPLITS[by].finditer(text)}
    parts, start, depth, place = [], 0, 0, 0
    while place < len(text) and cuts:
        if depth == 0 and place in cuts:
            parts.append(text[start:place])
            start = place = cuts[place]
            continue
        opened, closed = _OPEN.match(text, place), _CLOSE.match(text, place)
        depth += bool(opened) - bool(closed)
        place += len((opened or closed or " ")[0])
    return [part.strip() for part in [*parts, text[start:]]]


def _join_thousands(text: str) -> str:
    """1,234 becomes 1234 outside of brackets, where a comma separates nothing but digits."""

    def join(found: re.Match[str]) -> str:
        before = text[: found.start()]
        inside = len(_OPEN.findall(before)) > len(_CLOSE.findall(before))
        return found[0] if inside else found[0].replace(",", "")

    return THOUSANDS.sub(join, text)


def _all(parts: list[str], work: Work, nesting: int) -> tuple[Answer, ...]:
    return tuple(_read(part, work, nesting) for part in parts)


def _list(text: str, work: Work, nesting: int) -> Answer | None:
    parts = [part for part in _split(text, "list") if part]
    if not 1 < len(parts) <= MAX_ITEMS:
        return None
    return Collection("set", _flat(_all(parts, work, nesting)))


def _flat(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    """Of a list written with a plus-minus, the two values."""
    return tuple(
        inner
        for item in items
        for inner in (item.items if isinstance(item, Collection) and item.kind == "set" else (item,))
    )


_IN = re.compile(r"(?P<name>[A-Za-z])\s*\\in(?![A-Za-z])")


def _membership(text: str, work: Work, nesting: int) -> Answer | None:
    found = _IN.match(text)
    return Named(found["name"], _read(text[found.end() :], work, nesting)) if found else None


_PLUS_MINUS, _MINUS_PLUS = re.compile(r"\\pm(?![A-Za-z])"), re.compile(r"\\mp(?![A-Za-z])")


def _plus_minus(text: str, work: Work, nesting: int) -> Answer | None:
    if not _PLUS_MINUS.search(text):
        return None
    signs = [_MINUS_PLUS.sub(low, _PLUS_MINUS.sub(high, text)) for high, low in ("+-", "-+")]
    return Collection("set", _all(signs, work, nesting))


_NAME = re.compile(
    r'(?:\\angle\s*)?[A-Z]{2,3}|[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?(?:\s*\([A-Za-z](?:,\s*[A-Za-z])*\))?|\\[A-Za-z]+|"[^"]*"'
)


def _equation(text: str, work: Work, nesting: int) -> Answer | None:
    sides = _split(text, "equation")
    if len(sides) != 2 or not all(sides):
        return None
    if _NAME.fullmatch(sides[0]):
        return Named(re.sub(r"[\s{}]", "", sides[0]), _read(sides[1], work, nesting))
    return Collection("equation", _all(sides, work, nesting))


def _union(text: str, work: Work, nesting: int) -> Answer | None:
    parts = _split(text, "union")
    return Collection("union", _all(parts, work, nesting)) if 1 < len(parts) <= MAX_ITEMS else None


_BRACKETS = re.compile(r"(?P<open>\\\{|[(\[{])(?P<inside>.*?)(?P<close>\\\}|[)\]}])", re.DOTALL)


def _bracketed(text: str, work: Work, nesting: int) -> Answer | None:
    found = _BRACKETS.fullmatch(text)
    if not found:
        return None
    parts = _split(found["inside"], "list")
    kind = (found["open"] + found["close"]).replace("\\", "")
    if kind == "{}" and len(parts) == 1 and parts[0] and _is_closed(parts[0]):
        return _read(parts[0], work, nesting)
    if not 1 < len(parts) <= MAX_ITEMS or not all(parts) or not all(map(_is_closed, parts)):
        return None
    return Collection("set" if kind == "{}" else kind, _all(parts, work, nesting))


def _is_closed(text: str) -> bool:
    """Whether no bracket closes that did not open: (1)(2) is no pair of brackets around 1)(2."""
    depth = 0
    for found in re.finditer(r"\\[{}]|[(\[{}\])]", text):
        depth += 1 if found[0][-1] in "([{" else -1
        if depth < 0:
            return False
    return depth == 0


_MATRIX = re.compile(r"\\begin\s*\{([bpvBV]?matrix|array)\}(?:\{[lcr|]*\})?(?P<rows>.*)\\end\s*\{\1\}", re.DOTALL)


def _matrix(text: str, work: Work, nesting: int) -> Answer | None:
    found = _MATRIX.fullmatch(text)
    if not found:
        return None
    rows = [_split(row, "cell") for row in _split(found["rows"], "row") if row]
    if not rows or sum(map(len, rows)) > MAX_ITEMS:
        return None
    return Collection("matrix", tuple(Collection("row", _all(row, work, nesting)) for row in rows))


_QUOTED = re.compile(r'"([^"]*)"')


def _quoted(text: str, work: Work, nesting: int) -> Answer | None:
    found = _QUOTED.fullmatch(text)
    return _read(found[1], work, nesting) if found else None


_CHOICE = re.compile(r"\(([A-Z])\)")
_WORD = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]{2,}")  # and no command


def _scalar(text: str, work: Work) -> Answer:
    if _WORD.fullmatch(text) and text != "pi":
        return _words(text)
    plain = THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    letters = quantity_of_letters(plain)
    in_units = _measured(letters, work) if letters else None
    scalar = _measured(quantity(plain), work) or in_units
    return replace(scalar, in_units=in_units) if scalar else _words(text)


def _measured(taken: Quantity, work: Work) -> Scalar | None:
    """The expression with what stood around it; None when it is no expression."""
    try:
        node = read_expression(_CHOICE.sub(r"\1", taken.text))
    except Unreadable:
        return None
    if taken.factor != 1:
        node = Node("scaled", (node, number(taken.factor)))
    plain = replace(node, op="mul") if node.op == "scaled" else node
    try:
        value, reason = evaluate(plain, work), ""
    except Undecided as error:
        value, reason = None, str(error)
    return Scalar(node, value, reason, taken.percent, taken.unit)


_BLANKS = re.compile(r" ?([^\w ]) ?")
_BEHIND_COMMAND = re.compile(r"(\\[A-Za-z]+) (?![A-Za-z])")


def _words(text: str) -> Words:
    text = _BLANKS.sub(r"\1", " ".join(text.replace('"', " ").split())).rstrip(".!")
    text = _BEHIND_COMMAND.sub(r"\1", text)
    return Words(text.casefold() if _WORD.search(text) else text)


# --- what is equal --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """How two answers are compared.

    written_out: against a number, accept only a number written out. proven: pairs that are known to be equal.
    """

    written_out: bool = False
    proven: frozenset[Pair] = frozenset()


def equal(left: str, right: str) -> bool:
    """Whether two answers are the same, by exact arithmetic alone. Reflexive but for blank text, and symmetric."""
    return compare(left, right).equal


def judge(given: str, reference: str, proven: frozenset[Pair] = frozenset()) -> Verdict:
    """Whether `given` is right where `reference` is."""
    return compare(given, reference, Rules(written_out=True, proven=proven))


_DEFAULT_RULES = Rules()


def compare(given: str, reference: str, rules: Rules = _DEFAULT_RULES) -> Verdict:
    """The verdict under `rules`."""
    if not given.strip() or not reference.strip():
        return Verdict(False, "blank")
    if given.split() == reference.split():
        return Verdict(True, "the same text")
    work = Work()
    return _compare(read_answer(given, work), read_answer(reference, work), rules, work)


def _compare(given: Answer, reference: Answer, rules: Rules, work: Work) -> Verdict:
    if isinstance(given, Named) and isinstance(reference, Named) and given.name != reference.name:
        return Verdict(False, f"{given.name} is not {reference.name}")
    given = given.answer if isinstance(given, Named) else given
    reference = reference.answer if isinstance(reference, Named) else reference
    if isinstance(given, Named) or isinstance(reference, Named):
        return _compare(given, reference, rules, work)
    if isinstance(given, Scalar) and isinstance(reference, Scalar):
        return _compare_scalars(given, reference, rules, work)
    if isinstance(given, Collection) and isinstance(reference, Collection):
        return _compare_collections(given, reference, rules, work)
    if isinstance(given, Words) and isinstance(reference, Words):
        same_words = bool(given.text) and given.text == reference.text
        return Verdict(same_words, "the same words" if same_words else "other words")
    return Verdict(False, f"{_KINDS[type(given)]} is not {_KINDS[type(reference)]}")


_KINDS = {Scalar: "an expression", Words: "words", Collection: "a collection"}


def _compare_collections(given: Collection, reference: Collection, rules: Rules, work: Work) -> Verdict:
    if given.kind != reference.kind or len(given.items) != len(reference.items):
        return Verdict(False, f"{len(given.items)} in {given.kind}, not {len(reference.items)} in {reference.kind}")
    match = _match_any_order if given.kind in _UNORDERED else _match_in_order
    return match(given.items, reference.items, rules, work)


def _match_in_order(given: tuple[Answer, ...], reference: tuple[Answer, ...], rules: Rules, work: Work) -> Verdict:
    verdicts = [_compare(a, b, rules, work) for a, b in zip(given, reference, strict=True)]
    wrong = [verdict for verdict in verdicts if not verdict.equal]
    if not wrong:
        return Verdict(True, "every element")
    hopeless = [verdict for verdict in wrong if not verdict.undecided]
    if hopeless:
        return hopeless[0]
    return Verdict(False, wrong[0].reason, tuple(pair for verdict in wrong for pair in verdict.undecided))


def _match_any_order(given: tuple[Answer, ...], reference: tuple[Answer, ...], rules: Rules, work: Work) -> Verdict:
    """A perfect matching, by augmenting paths: a percentage may be the same as two numbers."""
    verdicts = [[_compare(a, b, rules, work) for b in reference] for a in given]
    partner: dict[int, int] = {}
    unmatched = [i for i in range(len(given)) if not _augment(i, verdicts, partner, set())]
    if not unmatched:
        return Verdict(True, "every element, in some order")
    undecided = tuple(pair for row in verdicts for verdict in row for pair in verdict.undecided)
    return Verdict(False, "an element has no equal", undecided)


def _augment(i: int, verdicts: list[list[Verdict]], partner: dict[int, int], seen: set[int]) -> bool:
    for j, verdict in enumerate(verdicts[i]):
        if verdict.equal and j not in seen:
            seen.add(j)
            if j not in partner or _augment(partner[j], verdicts, partner, seen):
                partner[j] = i
                return True
    return False


def _compare_scalars(given: Scalar, reference: Scalar, rules: Rules, work: Work) -> Verdict:
    if rules.written_out and given.in_units and is_written_out(reference.node) and is_written_out(given.in_units.node):
        given = given.in_units
    if not (given.unit <= reference.unit or reference.unit <= given.unit):
        return Verdict(False, f"the unit is {' '.join(sorted(given.unit))}, not {' '.join(sorted(reference.unit))}")
    if rules.written_out and is_written_out(reference.node) and not is_written_out(given.node):
        return Verdict(False, "a number was asked for, and an expression given")
    if given.percent == reference.percent:
        return _compare_values(given, reference, rules, work)
    as_unit = _compare_values(given, reference, rules, work)
    return as_unit if as_unit.equal else _compare_values(_hundredth(given), _hundredth(reference), rules, work)


def _hundredth(scalar: Scalar) -> Scalar:
    """A percentage as the number it is; any other unchanged."""
    if not scalar.percent or scalar.value is None:
        return scalar
    over = {term: factor / 100 for term, factor in scalar.value.over.items()}
    return replace(scalar, node=Node("div", (scalar.node, number(100))), value=Value(over, scalar.value.under))


def _compare_values(given: Scalar, reference: Scalar, rules: Rules, work: Work) -> Verdict:
    pair = (given.node, reference.node)
    if pair in rules.proven or given.node == reference.node:
        return Verdict(True, "the same expression" if given.node == reference.node else "proven")
    if given.value is None or reference.value is None:
        return Verdict(False, f"undecided: {given.reason or reference.reason}", (pair,))
    try:
        same_value = same(given.value, reference.value, work)
    except Undecided as error:
        return Verdict(False, f"undecided: {error}", (pair,))
    if same_value:
        return Verdict(True, "the same value")
    if given.value.certain and reference.value.certain:
        return Verdict(False, "another value")
    return Verdict(False, "undecided: beyond exact arithmetic", (pair,))


def is_written_out(node: Node) -> bool:
    """Whether it is a number as one writes a result: 5, -0.5, 1\frac12, 3/4 (not 6/3), 1.5 x 10^3, 2 million."""
    return _WRITTEN_OUT.get(node.op, lambda args: False)(node.args) if node.op != "number" else True


def _is_fraction(args: tuple[Node, ...]) -> bool:
    over, under = (_signed_number(arg) for arg in args)
    return over is not None and under is not None and under != 0 and (over / under).denominator != 1


def _signed_number(node: Node) -> Fraction | None:
    sign = -1 if node.op == "neg" else 1
    inner = node.args[0] if node.op == "neg" else node
    return sign * inner.value if isinstance(inner.value, Fraction) else None


def _is_scientific(args: tuple[Node, ...]) -> bool:
    mantissa, power = args
    if power.op != "pow" or _signed_number(mantissa) is None:
        return False
    base, exponent = power.args
    return base.value == 10 and _signed_number(exponent) is not None


_WRITTEN_OUT = {
    "neg": lambda args: is_written_out(args[0]),
    "mixed": lambda args: True,
    "div": _is_fraction,
    "mul": _is_scientific,
    "scaled": lambda args: is_written_out(args[0]),
}
