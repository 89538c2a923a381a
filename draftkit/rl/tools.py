"""Tools that a policy may call: a calculator, and a search over local text. Text in, text out, never an exception.

A wrong call is answered with a sentence that begins with "error:", as a person would read it; the policy may try again.
The calculator walks Python's syntax tree and knows numbers and arithmetic, nothing else: no names, no calls, nothing is
evaluated by Python itself. It is exact (fractions), and bounded in the length of its input and of its numbers.
The search ranks passages by BM25 (Robertson & Zaragoza, The Probabilistic Relevance Framework, 2009, equation 3.15,
with the non-negative idf of Lucene).
"""

from __future__ import annotations

import ast
import heapq
import json
import math
import operator
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

from draftkit.errors import UserError

# ------------------------------------------------------------------------------------------------------ calculator

MAX_CHARS, MAX_BITS = 200, 256  # of an expression; of a numerator or denominator (77 digits)
SIGNIFICANT = 10  # digits of a result that is no integer
TYPOGRAPHY = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class _Refused(Exception):
    """Why an expression has no result."""


def calculate(expression: str) -> str:
    """'12 * 7' -> '84', '1 / 3' -> '0.3333333333', '2 +' -> 'error: ...'."""
    text = expression.translate(TYPOGRAPHY).strip().rstrip("= ")
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)  # 1,000
    if not text:
        return "error: nothing to calculate"
    if len(text) > MAX_CHARS:
        return f"error: longer than {MAX_CHARS} characters"
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # the parser's own ways to refuse a text
        return "error: not an arithmetic expression"
    try:
        return _shown(_value(tree.body))
    except _Refused as refused:
        return f"error: {refused}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)) if math.isfinite(number) else None)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            a, b = _value(left), _value(right)
            if b == 0 and isinstance(op, ast.Div | ast.FloorDiv | ast.Mod):
                raise _Refused("division by zero")
            return _bounded(OPERATORS[type(op)](a, b))
    raise _Refused("only numbers, + - * / // % ** and brackets are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise _Refused("only whole exponents are known")
    if base == 0 and exponent < 0:
        raise _Refused("division by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and base != 0 and bits * abs(exponent.numerator) > 2 * MAX_BITS:
        raise _Refused("the result is too large")
    return _bounded(base ** (exponent.numerator % 2 if abs(base) == 1 else exponent.numerator))


def _bounded(value: Fraction | None) -> Fraction:
    if value is None or max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _Refused("the result is too large")
    return value


def _shown(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.{SIGNIFICANT}g}"


# ---------------------------------------------------------------------------------------------------------- search

K1, B = 1.2, 0.75  # BM25: how soon repeats of a word stop counting, and how much long passages are discounted
WORD = re.compile(r"\w+")


class Search:
    """BM25 over passages. `search(query)` is the best `num_results` of them, one a paragraph."""

    def __init__(self, passages: Sequence[str], num_results: int = 3, max_chars: int = 400) -> None:
        self.passages, self.num_results, self.max_chars = list(passages), num_results, max_chars
        words = [WORD.findall(p.casefold()) for p in self.passages]
        mean_length = sum(map(len, words)) / max(len(words), 1)
        self._postings: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, of_passage in enumerate(words):
            discount = K1 * (1 - B + B * len(of_passage) / mean_length) if of_passage else 0.0
            for word, count in Counter(of_passage).items():
                self._postings[word].append((number, count * (K1 + 1) / (count + discount)))

    def __call__(self, query: str) -> str:
        scores: defaultdict[int, float] = defaultdict(float)
        for word in set(WORD.findall(query.casefold())):
            found = self._postings.get(word, [])
            rarity = math.log(1 + (len(self.passages) - len(found) + 0.5) / (len(found) + 0.5))
            for number, weight in found:
                scores[number] += rarity * weight
        best = heapq.nsmallest(self.num_results, scores, key=lambda n: (-scores[n], n))
        if not best:
            return "error: no passage has any of these words"
        return "\n\n".join(self.passages[n][: self.max_chars] for n in best)


def read_passages(path: Path) -> list[str]:
    """A .jsonl file's `text` fields (after their `title`, where they have one), or a text file's paragraphs."""
    if not path.is_file():
        raise UserError(
            f"The text to search, {path}, does not exist.", "Mend `documents` in the data recipe (relative to it)."
        )
    if path.suffix != ".jsonl":
        passages = [" ".join(p.split()) for p in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    else:
        passages = []
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                title, text = record.get("title"), record["text"]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f'{path} line {number} is not a JSON object with a "text".', "Mend or delete that line."
                ) from None
            passages.append(f"{title}: {text}" if title else str(text))
    passages = [p for p in passages if p.strip()]
    if not passages:
        raise UserError(f"The text to search, {path}, is empty.", "It needs at least one passage.")
    return passages
