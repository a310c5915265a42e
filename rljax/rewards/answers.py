r"""Finding the final answer in a text and deciding whether two answers are the same.

The rules (there is no computer algebra behind them):

| written | read as |
| --- | --- |
| `\boxed{5}`, `$5$`, `\(5\)`, `**5**`, `5.` | 5 |
| `1,234`, `1{,}234`, `1\,234` | 1234: commas before every three digits are thousands separators |
| `\frac{1}{2}`, `\dfrac12`, `1/2`, `0.5`, `.50` | one half, exactly; `0.33` is not `1/3` |
| `1\frac{1}{2}`, `1 1/2` | one and a half |
| `2\sqrt{3}`, `\pi/2`, `2^{10}`, `1.5 \times 10^3`, `1.5e3` | its value; irrational ones to 1e-9 |
| `50%`, `50\%`, `50 percent` | 50 with the unit percent (so not 0.5) |
| `90^\circ`, `90°`, `90 degrees` | 90 with the unit degree |
| `$18`, `18 dollars`, `5 \text{ cm}`, `72 clips` | a number with a unit |
| `x = 5`, `x \in [0, 1]` | the right-hand side |
| `[0, 1)`, `(-\infty, 2]`, `(1, 2)` | interval, point or tuple: brackets, order and values count |
| `(0,1) \cup (2,3)` | the parts in any order |
| `\{1, 2\}`, `1, 2`, `1 and 2` | the values in any order |
| `(A)` | A |
| all else | text: white space, and in plain words case, do not count |

A unit on one side only is ignored; units on both sides must agree.
"""

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, NamedTuple

Number = Fraction | float


class Quantity(NamedTuple):
    """A number and its unit, "" for none."""

    number: Number
    unit: str


class Collection(NamedTuple):
    """Values between two brackets; "{" means values in any order, "U" a union."""

    brackets: str
    values: tuple["Answer", ...]


Answer = Quantity | Collection | str


def extract_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (or `\fbox`), braces nested; None if there is none.

    A last box that is not closed, as in a text cut off, is None too: an earlier one was not the
    final answer. Without braces, `\boxed 5` holds what follows up to white space or `$`.
    """
    boxes = list(re.finditer(r"\\f?box(?:ed)?(?![A-Za-z])\s*", text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not text.startswith("{", start):
        found = re.match(r"[^\s$]+", text[start:])
        return found.group() if found else None
    depth = 0
    for brace in re.finditer(r"(?<!\\)(?:\\\\)*([{}])", text[start:]):
        depth += 1 if brace.group(1) == "{" else -1
        if not depth:
            return text[start + 1 : start + brace.end() - 1]
    return None


def extract_final(text: str) -> str | None:
    r"""The final answer of a text; None if there is none.

    The first of these that the text has: the last `\boxed{...}`; the rest of the line after the
    last `####`; the content of the last `<answer>...</answer>`; the last number.
    """
    if re.search(r"\\f?box(?:ed)?(?![A-Za-z])", text):
        return extract_boxed(text)
    _, marked, rest = text.rpartition("####")
    if marked:
        return rest.strip().partition("\n")[0].strip() or None
    _, opened, rest = text.rpartition("<answer>")
    if opened and "</answer>" in rest:
        return rest.partition("</answer>")[0].strip() or None
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def extract_reference(answer: str) -> str:
    r"""The answer itself of a data column: after `####`, in `\boxed{}`, or the whole column."""
    _, marked, rest = answer.rpartition("####")
    if marked:
        return rest.strip()
    boxed = extract_boxed(answer)
    return answer if boxed is None else boxed


def same_answer(given: str, reference: str) -> bool:
    """Whether two answers are the same by the rules above.

    Args:
      given: A response's answer.
      reference: The right answer.

    Returns:
      True if they are. Empty answers are never the same.
    """
    first, second = parse(given), parse(reference)
    return first != "" and _same(first, second)


def parse(text: str) -> Answer:
    """Reads an answer by the rules above; one over 1,000 characters is text and nothing else."""
    if len(text) > 1000:
        return "".join(text.split())
    text = _clean(text)
    parts = re.split(r"\\cup(?![A-Za-z])|∪", text)
    if len(parts) > 1:
        return Collection("U", tuple(map(parse, parts)))
    quantity = _quantity(text)
    if quantity is not None:
        return quantity
    if re.fullmatch(r"\([A-Za-z]\)", text):
        return text[1].casefold()
    opening, closing = text[:1], text[-1:]
    if text[:2] == "\\{" and text[-2:] == "\\}":
        inner, brackets = text[2:-2], "{"
    elif opening and opening in "([" and closing in ")]" and _encloses(text):
        inner, brackets = text[1:-1], opening + closing
    else:
        inner, brackets = re.sub(r",?\s+(?:and|or)\s+", ",", text), "{"
    values = _split(inner)
    if len(values) > 1:
        return Collection(brackets, tuple(map(parse, values)))
    plain = "".join(_plain_spelling(text).split())
    return plain.casefold() if plain.isalpha() else plain


_THOUSANDS = r"\d{1,3}(?:,\d{3})+(?![\d,])"
_NUMBER = re.compile(rf"(?:{_THOUSANDS}(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_LAST_NUMBER = re.compile(
    rf"(?<![\w.])[-−]?\$?(?:{_THOUSANDS}|\d+)(?:\.\d+)?(?:/\d+(?:\.\d+)?)?%?|"
    r"(?<![\w.])[-−]?\.\d+%?|\d+(?:\.\d+)?"
)
_UNIT = re.compile(r"(?P<value>.*[\d)}.])\s+(?P<unit>[A-Za-z][A-Za-z /.]*(?:\s*\^\s*\{?\d\}?)?)")
_NOT_UNITS = {"and", "or", "pi", "x", "y", "z", "n", "i", "e", "mod"}
_UNIT_NAMES = {
    "°": "degree",
    "%": "percent",
    "cm": "centimeter",
    "centimetre": "centimeter",
    "mm": "millimeter",
    "m": "meter",
    "metre": "meter",
    "km": "kilometer",
    "kilometre": "kilometer",
    "g": "gram",
    "kg": "kilogram",
    "ft": "foot",
    "feet": "foot",
    "in": "inch",
    "inche": "inch",
    "h": "hour",
    "hr": "hour",
    "min": "minute",
    "sec": "second",
    "usd": "dollar",
}


def _clean(text: str) -> str:
    text = text.strip()
    text = re.sub(
        r"\\left(?![A-Za-z])|\\right(?![A-Za-z])|\\[Bb]igg?[lr]?(?![A-Za-z])|\\!", "", text
    )
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})", ",", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\xa0", " ", text)
    text = re.sub(
        r"\\(?:text|mathrm|textbf|mathbf|mbox|textit|operatorname)\s*\{([^{}]*)\}", r" \1 ", text
    )
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degree(?![A-Za-z])", "°", text)
    text = text.replace("\\%", "%").replace("\\$", "$").replace("−", "-").replace("–", "-")
    text = text.replace("\\lbrace", "\\{").replace("\\rbrace", "\\}")
    text = re.sub(r"^(?:\\\(|\\\[)(.*)(?:\\\)|\\\])$", r"\1", text, flags=re.DOTALL)
    previous = None
    while previous != text:
        previous = text
        text = text.strip().strip("*").rstrip(".,;:!").strip()
        if len(text) > 1 and text[0] == text[-1] == "$":
            text = text[1:-1]
    return re.sub(r"^[A-Za-z](?:_\{?\w+\}?)?\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=]+$)", "", text)


def _quantity(text: str) -> Quantity | None:
    unit = ""
    currency = re.match(r"([-+]?)\s*([$€£])\s*(?=[\d.])", text)
    if currency:
        text = currency.group(1) + text[currency.end() :]
        unit = {"$": "dollar", "€": "euro", "£": "pound"}[currency.group(2)]
    elif text.endswith("$") and text.count("$") == 1:
        text, unit = text[:-1], "dollar"
    elif text.endswith(("%", "°")):
        text, unit = text[:-1], _UNIT_NAMES[text[-1]]
    else:
        found = _UNIT.fullmatch(text)
        if found and found.group("unit").split()[0].lower() not in _NOT_UNITS:
            text, unit = found.group("value"), _unit(found.group("unit"))
    number = evaluate(text)
    return None if number is None else Quantity(number, unit)


def _unit(text: str) -> str:
    text = re.sub(r"\s*\^\s*\{?(\d)\}?", r"^\1", text.lower())
    words = []
    power = ""
    for word in re.findall(r"[a-z]+|/|\^\d", text.replace(" per ", "/")):
        if word in ("square", "sq", "cubic", "cu"):
            power = "^2" if word.startswith("sq") else "^3"
            continue
        name = word[:-1] if len(word) > 2 and word.endswith("s") else word
        words.append(_UNIT_NAMES.get(name, name))
    return " ".join([*words, power]).replace(" ^", "^").strip()


def _encloses(text: str) -> bool:
    """Whether the first bracket is closed by the last one."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if not depth:
            return i == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Cuts at the commas outside all brackets."""
    parts = [""]
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _plain_spelling(text: str) -> str:
    text = re.sub(r"\\cdot(?![A-Za-z])|\\times(?![A-Za-z])|[*×·]", "", text)
    return re.sub(r"\{(\w)\}", r"\1", text)


def _same(first: Answer, second: Answer) -> bool:
    if isinstance(first, Quantity) and isinstance(second, Quantity):
        units_agree = not first.unit or not second.unit or first.unit == second.unit
        return units_agree and _equal(first.number, second.number)
    if isinstance(first, Collection) and isinstance(second, Collection):
        if first.brackets != second.brackets or len(first.values) != len(second.values):
            return False
        if first.brackets in ("{", "U"):
            return _same_in_any_order(first.values, second.values)
        return all(map(_same, first.values, second.values))
    return isinstance(first, str) and isinstance(second, str) and first == second


def _same_in_any_order(first: Iterable[Answer], second: Iterable[Answer]) -> bool:
    rest = list(second)
    for value in first:
        match = next((i for i, other in enumerate(rest) if _same(value, other)), None)
        if match is None:
            return False
        del rest[match]
    return True


def _equal(first: Number, second: Number) -> bool:
    if isinstance(first, Fraction) and isinstance(second, Fraction):
        return first == second
    return math.isclose(first, second, rel_tol=1e-9, abs_tol=1e-12)


def evaluate(text: str) -> Number | None:
    r"""The value of an expression of numbers, \frac, \sqrt, \pi, \infty, + - * / ^ and brackets.

    Returns:
      A Fraction where the value is rational and found exactly, a float otherwise, None where the
      text is no such expression (or is absurdly large, or has no real value).
    """
    mixed = re.fullmatch(r"([-+]?)\s*(\d+)\s+(\d+)\s*/\s*(\d+)", text.strip())
    if mixed and int(mixed.group(4)):
        whole, top, bottom = (int(g) for g in mixed.groups()[1:])
        value = whole + Fraction(top, bottom)
        return -value if mixed.group(1) == "-" else value
    try:
        number = _Evaluator(text).run()
    except (ValueError, ArithmeticError):
        return None
    return None if number != number else number


class _Evaluator:
    """Recursive descent over the text of an expression; ValueError where it is none."""

    def __init__(self, text: str):
        if len(text) > 500:
            raise ValueError
        self._text = text
        self._at = 0
        self._depth = 0

    def run(self) -> Number:
        value = self._sum()
        if self._rest():
            raise ValueError
        return value

    def _rest(self) -> str:
        rest = self._text[self._at :]
        self._at += len(rest) - len(rest.lstrip())
        return self._text[self._at :]

    def _take(self, pattern: str) -> bool:
        found = re.match(pattern, self._rest())
        if found:
            self._at += found.end()
        return found is not None

    def _sum(self) -> Number:
        self._depth += 1
        if self._depth > 50:
            raise ValueError
        value = self._product()
        while True:
            if self._take(r"\+"):
                value = value + self._product()
            elif self._take("-"):
                value = value - self._product()
            else:
                self._depth -= 1
                return value

    def _product(self) -> Number:
        value = self._signed()
        while True:
            if self._take(r"\*|×|·|\\cdot(?![A-Za-z])|\\times(?![A-Za-z])"):
                value = value * self._signed()
            elif self._take(r"/|÷|\\div(?![A-Za-z])"):
                value = value / self._signed()
            elif re.match(r"[({\\π]|pi\b", self._rest()):
                value = value * self._power()
            else:
                return value

    def _signed(self) -> Number:
        if self._take("-"):
            return -self._power()
        self._take(r"\+")
        return self._power()

    def _power(self) -> Number:
        base = self._atom()
        if not self._take(r"\^"):
            return base
        exponent = self._signed()
        whole = int(exponent)
        if isinstance(base, Fraction) and exponent == whole:
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if size * abs(whole) > 4096:
                raise ValueError
            return base**whole
        power: Any = float(base) ** float(exponent)
        if isinstance(power, complex):
            raise ValueError
        return power

    def _atom(self) -> Number:
        if self._take(r"\("):
            return self._until(r"\)")
        if self._take(r"\{"):
            return self._until(r"\}")
        if self._take(r"\\frac(?![A-Za-z])"):
            return self._argument() / self._argument()
        if self._take(r"\\sqrt(?![A-Za-z])|√"):
            degree = self._until(r"\]") if self._take(r"\[") else Fraction(2)
            return _root(self._argument(), degree)
        if self._take(r"\\pi(?![A-Za-z])|π|pi\b"):
            return math.pi
        if self._take(r"\\infty(?![A-Za-z])|∞"):
            return math.inf
        found = _NUMBER.match(self._rest())
        if not found:
            raise ValueError
        self._at += found.end()
        if len(found.group()) > 100 or re.search(r"[eE][+-]?\d{4}", found.group()):
            raise ValueError
        number = Fraction(found.group().replace(",", ""))
        if found.group().isdigit() and re.match(r"\\frac(?![A-Za-z])", self._rest()):
            part = self._atom()  # a mixed number
            return number + part if 0 <= part < 1 else number * part
        return number

    def _argument(self) -> Number:
        """What a LaTeX command takes: a group in braces, or one digit."""
        digit = re.match(r"\d", self._rest())
        if digit:
            self._at += 1
            return Fraction(digit.group())
        return self._atom()

    def _until(self, bracket: str) -> Number:
        value = self._sum()
        if not self._take(bracket):
            raise ValueError
        return value


def _root(value: Number, degree: Number) -> Number:
    if isinstance(value, Fraction) and degree == 2 and value >= 0:
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if (top * top, bottom * bottom) == (value.numerator, value.denominator):
            return Fraction(top, bottom)
    root: Any = float(value) ** (1 / float(degree))
    if isinstance(root, complex):
        raise ValueError
    return root
