"""Every way of writing an answer has a stated verdict."""

import json
import time

import pytest

from rljax.rewards import boxed, exact_match, numeric
from rljax.rewards.answers import (
    evaluate,
    extract_boxed,
    extract_final,
    extract_reference,
    same_answer,
)

SAME = [
    # decorations
    ("5", "5"),
    (" 5 ", "5"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    ("$$5$$", "5"),
    ("**5**", "5"),
    ("72.", "72"),
    ("72.0", "72"),
    ("+5", "5"),
    ("−5", "-5"),
    ("007", "7"),
    # thousands
    ("1,234", "1234"),
    ("1{,}234,567.50", "1234567.5"),
    (r"1\,234", "1234"),
    ("-1,000", "-1000"),
    # fractions and powers
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", r"\tfrac12"),
    ("1/2", ".50"),
    (r"-\frac{3}{4}", "-3/4"),
    (r"\frac{-3}{4}", "-0.75"),
    (r"1\frac{1}{2}", "1.5"),
    ("-1 1/2", r"-\frac{3}{2}"),
    ("2^{10}", "1024"),
    ("-2^2", "-4"),
    ("(-2)^2", "4"),
    (r"1.5 \times 10^3", "1500"),
    ("1.5e3", "1,500"),
    (r"10^{-2}", "0.01"),
    # roots and pi
    (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\sqrt{16}", "4"),
    (r"\sqrt[3]{8}", "2"),
    (r"\frac{\pi}{2}", r"0.5\pi"),
    (r"2\pi", "2π"),
    # percent, degrees, money, units
    ("50%", "50"),
    (r"50\%", "50 percent"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90 degrees"),
    ("90°", r"90^\circ"),
    (r"\$18", "18"),
    ("$18.00", "18 dollars"),
    ("18$", "$18$"),
    (r"5\text{ cm}", "5"),
    (r"5 \text{cm}", "5 centimeters"),
    (r"10\text{ cm}^2", "10 square centimeters"),
    ("72 clips", "72"),
    ("60 miles per hour", "60 miles/hour"),
    # equations
    ("x = 5", "5"),
    (r"x \in [0, 1]", "[0,1]"),
    # intervals, tuples, sets
    ("[0, 1)", r"\left[0, 1\right)"),
    (r"(-\infty, 0.5]", r"(-\infty,\frac{1}{2}]"),
    (r"(0,1) \cup (2,3)", r"(2, 3)\cup(0, 1)"),
    ("(1, 2)", "(1,2)"),
    (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1, -2", "-2,1"),
    ("1 and 2", "2, 1"),
    ("3, 5, or 7", "3,5,7"),
    # text
    ("(A)", "A"),
    (r"\text{(A)}", "A"),
    ("evelyn", r"\text{Evelyn}"),
    ("x^2 + 1", "x^{2}+1"),
    (r"2 \cdot x", "2x"),
    ("3:2", "3 : 2"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
]

DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("", ""),
    ("", "5"),
    ("0.33", "1/3"),
    ("50%", "0.5"),
    ("50%", "50 degrees"),
    ("5 cm", "5 m"),
    (r"5\text{ cm}", "5 square centimeters"),
    ("18 cents", "$18"),
    ("2x", "2"),
    ("2", "2 x"),
    ("[0, 1)", "[0, 1]"),
    ("(0, 1)", "0, 1"),
    ("(1, 2)", "(2, 1)"),
    (r"\{1, 2\}", r"\{1, 1\}"),
    ("1, 2", "1, 2, 3"),
    (r"(0,1) \cup (2,3)", "(0,1)"),
    ("1,23", "123"),
    ("3,5", "3.5"),
    ("1 234", "1234"),
    ("five", "5"),
    ("x^2", "x^3"),
    ("x", "X+"),
    ("1/0", "0"),
    (r"\sqrt{-1}", "1"),
    ("9^9^9^9", "9"),
    ("nan", "0"),
    (r"\infty", r"-\infty"),
    ("1" * 5000, "2" * 5000),
    ("(" * 5000, "5"),
]


@pytest.mark.parametrize(("given", "reference"), SAME)
def test_same(given, reference):
    assert same_answer(given, reference) and same_answer(reference, given)


@pytest.mark.parametrize(("given", "reference"), DIFFERENT)
def test_different(given, reference):
    assert not same_answer(given, reference) and not same_answer(reference, given)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1}, no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\text{a {b} c}} and {more}", r"\text{a {b} c}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {5}", "5"),
        (r"$\boxed 5$", "5"),
        (r"\fbox{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} then \boxed{2", None),
        (r"\boxed", None),
        (r"\boxedness{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_wins(text, content):
    assert extract_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"#### 3 \boxed{5} 7", "5"),
        ("work 1\n#### 72.", "72."),
        ("work 1\n#### 72 clips\n<|end|>", "72 clips"),
        ("<think>3</think> <answer> 4 </answer> 5", "4"),
        ("It is 3, no, 1,234.", "1,234"),
        ("about $18.50.", "$18.50"),
        ("so 3/4", "3/4"),
        ("= -4", "-4"),
        ("10-4", "4"),
        ("half: .5", ".5"),
        ("50% of them", "50%"),
        ("In 2020, 5", "5"),
        ("1,234,5678", "5678"),
        ("none", None),
        ("####", None),
        (r"7 \boxed{", None),
        ("", None),
    ],
)
def test_the_final_answer_is_found(text, answer):
    assert extract_final(text) == answer


def test_references_may_be_worked_solutions():
    assert extract_reference("3+4=<<3+4=7>>7\n#### 7") == "7"
    assert extract_reference(r"Hence \boxed{\frac12}.") == r"\frac12"
    assert extract_reference("(1, 2)") == "(1, 2)"


@pytest.mark.smoke
def test_verifiers_give_one_or_zero_and_nothing_parsable_is_wrong():
    texts = [r"\boxed{5}", "#### 5.", "it is 5", "5", r"\boxed{6} 5", "", "none", r"\boxed{5"]
    answers = ["work\n#### 5"] * len(texts)
    assert boxed(texts, answers) == [1, 0, 0, 0, 0, 0, 0, 0]
    assert numeric(texts, answers) == [1, 1, 1, 1, 0, 0, 0, 0]
    assert exact_match([" 64\n", "064", "6 4", "64.", ""], ["64"] * 5) == [1, 0, 0, 0, 0]
    assert exact_match(["7", "a  b", "A b"], [7, "a b ", "a b"]) == [1, 1, 0]


@pytest.mark.parametrize(
    "text",
    [
        "{" * 20000,
        r"\boxed{" * 5000,
        "1," * 20000,
        "-" * 20000,
        " " * 20000 + "5 " + "a " * 20000 + "!",
        "1 " * 20000,
        "9" * 20000,
        r"\text{" * 5000,
        "9^" * 200 + "9",
        "(" * 240 + "1" + ")" * 240,
        ".1" * 10000,
        "$" * 20000,
    ],
)
def test_no_text_takes_long_or_raises(text):
    start = time.process_time()  # of this process alone, whatever else the machine does
    for verify in (boxed, numeric, exact_match):
        assert len(verify([text, r"\boxed{" + text + "}"], ["7", text])) == 2
    assert time.process_time() - start < 1


def test_values_are_exact_where_they_are_rational():
    assert evaluate("0.1 + 0.2") == evaluate("0.3")
    assert evaluate(r"\sqrt{2}") == pytest.approx(2**0.5, abs=0)
    assert evaluate("two") is None and evaluate("3 4") is None and evaluate("") is None


def test_answers_of_the_public_sets_agree_with_themselves():
    answers = json.loads(
        r"""["\\left( 3, \\frac{\\pi}{2} \\right)", "p - q", "\\frac{14}{3}", "9",
        "\\text{Evelyn}", "42", "27", "90^\\circ", "3\\sqrt{13}", "4", "2220", "\\frac{3}{56}",
        "6 - 5i", "-50", "\\pi", "28", "11,\\! 111,\\! 111,\\! 100", "x=5", "\\$32,\\!348",
        "(-\\infty, 2) \\cup (3, \\infty)", "5.4 \\text{ cents}", "10\\%", "4210_{5}"]"""
    )
    for answer in answers:
        assert boxed([rf"so $\boxed{{{answer}}}$."], [answer]) == [1]
        assert boxed([rf"\boxed{{{answer}}}"], ["1234567"]) == [0]
