r"""One spelling for the many of one answer: TeX spacing and sizes, delimiters, text commands, units, number words.

Knows characters and words; it must not know expressions, nor what is equal. What \text{...} and its like hold is kept
between double quotes ('5 "cm"'), since words of that kind are never a product of letters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

_CHARACTERS = str.maketrans(
    {
        '"': "", "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": r"\div ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "±": r"\pm ", "∈": r"\in ", "θ": r"\theta ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ",
        "²": "^{2}", "³": "^{3}", "°": r"^{\circ}", "√": r"\sqrt ", "½": " 1/2", "¼": " 1/4", "¾": " 3/4",
        "\N{NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ", "$": "", "£": "", "€": "", "¥": "", "％": "%",
    }
)  # fmt: skip

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname|rm)\s*\{([^{}]*)\}")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
_REPLACED = [
    (re.compile(r"\\\\"), r" \\cr "),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\(?:left|right|middle|big|Big|bigg|Bigg|displaystyle|textstyle|limits)(?![A-Za-z])\.?"), ""),
    (re.compile(r"\\(?:quad|qquad|enspace|thinspace)(?![A-Za-z])"), " "),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])|\\\|"), "|"),
    (re.compile(r"\\leq(?:slant)?(?![A-Za-z])|<="), r"\\le "),
    (re.compile(r"\\geq(?:slant)?(?![A-Za-z])|>="), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\degrees?(?![A-Za-z])"), r"^{\\circ}"),
    (re.compile(r"([0-9])\{,\}(?=[0-9])"), r"\1"),
    (
        re.compile(r"(?<![0-9A-Za-z.,/^_}])([0-9]{1,3}(?: [0-9]{3})+)(?![0-9A-Za-z./]| [0-9])"),
        lambda m: m[1].replace(" ", ""),
    ),
    (re.compile(r"\^\s*(?:\{\s*(?:\\circ|o)\s*\}|\\circ(?![A-Za-z]))"), r"^{\\circ}"),
]


def clean(text: str) -> str:
    """`text` in the one spelling. Time linear in its length."""
    text = text.replace(r"\$", "").translate(_CHARACTERS)
    boxed = _BOX.fullmatch(text.strip())
    text = boxed[1] if boxed else text
    text = _TEXT.sub(r' "\1" ', text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).rstrip(".,; ")


THOUSANDS = re.compile(r"(?<![0-9.,])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])")
"""A number whose thousands are set off by commas: 1,234,567 and not 1,23 nor 0,123."""


@dataclass(frozen=True)
class Quantity:
    """The text of a number or expression without what stands around it.

    factor: of a number word ("million"). percent: a percent sign followed. unit: the words of the unit, each by its one
    name: {"cm2"} of square centimeters, {"mi", "/h"} of miles per hour, {"apple"} of what is no unit elsewhere.
    """

    text: str
    factor: Fraction = Fraction(1)
    percent: bool = False
    unit: frozenset[str] = frozenset()


_SCALES: Mapping[str, int] = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12,
}  # fmt: skip

_UNITS: Mapping[str, str] = {
    spelling: name
    for name, spellings in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres",
        "km": "km kilometer kilometers kilometre kilometres",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yard yards",
        "mi": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kilogram kilograms",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "ml": "ml mL milliliter milliliters millilitre millilitres",
        "l": "l L liter liters litre litres",
        "s": "s sec second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "year years",
        "cent": "cent cents",
        "dollar": "dollar dollars usd USD",
        "degree": "degree degrees deg",
        "radian": "radian radians rad",
    }.items()
    for spelling in spellings.split()
}
_UNIT_NAMES = frozenset(_UNITS.values())
_SPELLED_OUT: Mapping[str, str] = {"mph": "mi per h", "kph": "km per h", "kmh": "km per h"}
_RAISING: Mapping[str, str] = {"square": "2", "sq": "2", "cubic": "3"}
_RAISED: Mapping[str, str] = {"squared": "2", "cubed": "3"}
_CONNECTING = "pi infty or and not nor no but than by plus minus times"
_FUNCTIONS = "sqrt sin cos tan cot sec csc log ln exp"
_NO_UNIT, _NO_PLAIN_UNIT = frozenset(_CONNECTING.split()), frozenset(f"{_CONNECTING} {_FUNCTIONS}".split())
_PERCENT = re.compile(r'\s*(?:\\?%|"?\s*\bpercent\s*"?)$')
_DEGREES = re.compile(r"\s*\^\{\\circ\}(?:\s*[CF])?$")
_ANGLES = re.compile(r"sin|cos|tan|cot|sec|csc")  # what they take is no unit
_NUMBER_ENDS = re.compile(r"[0-9)}\].]$")
_POWER = r"(?:\s*\^\s*\{?\s*(?P<power>[1-9])\s*\}?)?$"
_WORDS = re.compile(r'(?P<value>.*[^\s"])\s*"(?P<words>[^"]*)"' + _POWER, re.DOTALL)
_PLAIN_WORDS = re.compile(
    r"(?P<value>.*(?:[0-9)}\]]|\bpi\b))\s*(?P<words>[A-Za-z]{2,}\.?(?:(?: | ?/ ?)[A-Za-z]+){0,5})" + _POWER, re.DOTALL
)
_LETTER = re.compile(
    r"(?P<value>.*[0-9)}\]]) ?(?P<words>[A-Za-z](?:(?: ?/ ?| per )[A-Za-z]+)?|/ ?[A-Za-z]{2,})" + _POWER, re.DOTALL
)


def quantity(text: str) -> Quantity:
    """`text`, which is clean, taken apart. Words are a unit behind a number or a bracket; behind pi or a symbol only
    those are that are known to be one."""
    percent = _PERCENT.search(text)
    if percent:
        return Quantity(text[: percent.start()].strip(), percent=True)
    degrees = _DEGREES.search(text)
    if degrees and not _ANGLES.search(text):
        return Quantity(text[: degrees.start()].strip(), unit=frozenset({"degree"}))
    found = _WORDS.match(text) or _PLAIN_WORDS.match(text)
    words = _spelled_out(found["words"]) if found else []
    if not found or not words or not (_is_plain_unit if found.re is _PLAIN_WORDS else _is_unit)(words):
        return Quantity(text)
    factor = Fraction(_SCALES.get(words[0].lower(), 1))
    words = words[1:] if factor != 1 else words
    if words == ["percent"]:
        return Quantity(found["value"].strip(), factor, percent=True)
    unit = _unit(words, found["power"] or "")
    if not _NUMBER_ENDS.search(found["value"]) and not _is_known(unit):
        return Quantity(text)
    return Quantity(found["value"].strip(), factor, unit=unit)


def quantity_of_letters(text: str) -> Quantity | None:
    """`text` where its last letters, which are a product in algebra, are read as a known unit: 5 m, 5 m/s, 18/day."""
    found = _LETTER.match(text)
    unit = _unit(_spelled_out(found["words"]), found["power"] or "") if found else frozenset()
    return Quantity(found["value"].strip(), unit=unit) if found and _is_known(unit) else None


def _spelled_out(text: str) -> list[str]:
    words = text.replace(".", "").replace("/", " per ").split()
    return [part for word in words for part in _SPELLED_OUT.get(word, word).split()]


def _is_unit(words: list[str]) -> bool:
    return not any(word.lower() in _NO_UNIT or word[0].isdigit() for word in words)


def _is_plain_unit(words: list[str]) -> bool:
    """Words that nobody would mean as a product of variables."""
    leading = {words[0], *(word for before, word in pairwise(words) if before == "per")}
    recognised = all(len(word) > 3 or word in _UNITS or word in _RAISING or word == "per" for word in leading)
    return recognised and words[-1] != "per" and not {word.lower() for word in words} & _NO_PLAIN_UNIT


def _is_known(unit: frozenset[str]) -> bool:
    return {name.strip("/123456789") for name in unit} <= _UNIT_NAMES


def _unit(words: list[str], power: str) -> frozenset[str]:
    names, below, raised = [""], "", ""
    for word in words:
        if word == "per":
            below = "/"
        elif word in _RAISING:
            raised = _RAISING[word]
        elif word in _RAISED:
            names[-1] += _RAISED[word]
        else:
            names.append(f"{below}{_unit_name(word)}{raised}")
            below = raised = ""
    names[-1] += power.replace("1", "")
    return frozenset(name for name in names if name.strip("/123456789") not in ("", "unit"))


def _unit_name(word: str) -> str:
    return _UNITS.get(word) or _UNITS.get(word.lower()) or word.lower().rstrip("es")  # one name for one and many
