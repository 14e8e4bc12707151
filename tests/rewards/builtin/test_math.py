"""Correct answers get 1, in any formatting variant; other answers get 0."""

import threading
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from fractions import Fraction
from math import nan
from typing import Any

import pytest

from litgrpo.rewards import Reward, Scorer, Scoring
from litgrpo.rewards.builtin.code import read_tests
from litgrpo.rewards.builtin.dialogue import bleu, f1, lapdog, rouge_l
from litgrpo.rewards.builtin.format import json_fields
from litgrpo.rewards.builtin.length import cosine_length
from litgrpo.rewards.builtin.math import (
    closeness,
    correctness,
    exact,
    gsm8k,
    math_verify,
    parse_reference,
)
from litgrpo.rewards.calls import Call
from litgrpo.rewards.runner import stays_in_process
from tests.oracle.reference import GSM8K
from tests.support.raises import raises_for


def judge(completion: str, gold: object = "72", **kwargs: object) -> float | None:
    return correctness(["?"], [completion], answer=[gold], **kwargs)[0]  # type: ignore[list-item,arg-type]


def tag(answer: str) -> str:
    return f"<reasoning>because</reasoning>\n<answer>{answer}</answer>"


@pytest.mark.parametrize(
    "gold", ["72", "72.0", " $72 ", 72, 72.0, "48 + 24 = 72\n#### 72", r"so \boxed{72}"]
)
def test_a_right_answer_earns_one_whatever_form_the_gold_has(gold: object) -> None:
    assert judge(tag("72"), gold) == 1.0
    assert judge(tag("73"), gold) == 0.0


@pytest.mark.parametrize(
    "completion",
    [
        "", "72", "no idea", tag("no idea"), tag(""), tag("  "), tag("-72"),
        tag("72 or 73"), tag("7 2 72"), tag(" ".join(map(str, range(100)))),
        tag("72") + tag("73"), tag("73") + tag("72"), "<answer>72",
        "</answer>72<answer>", "<answer>72</answer><answer>", "<answer>73<answer>72</answer>",
        "<answer></answer>72", "answer: 72", tag("What is 48 plus 24?"), tag("the answer"),
        tag("72^1"), "#### 72", r"\boxed{72}", tag(r"\boxed{71}\boxed{72}"),
        tag("#### 71\n#### 72"), tag("not 72"), "correct right true 72 answer",
        tag("x" * 1000), tag("9" * 5000),
    ],
)  # fmt: skip
def test_nothing_but_one_right_answer_in_tags_earns_credit(completion: str) -> None:
    assert judge(completion) == 0.0


def test_a_question_or_a_text_with_the_number_in_it_is_no_answer() -> None:
    assert judge(tag("Tom has 72 apples. How many apples does Tom have?")) == 0.0
    assert judge(tag("So " + "so " * 20 + "it is 72.")) == 0.0
    assert judge(tag("Natalia sold 72 clips altogether in the months of April and May.")) == 1.0
    assert judge(tag("72 clips?")) == 1.0


def test_a_repeated_equal_answer_is_no_contradiction() -> None:
    assert judge(tag("72") + tag("$72.00")) == 1.0


def test_without_tags_other_marks_and_the_last_line_count() -> None:
    right = [
        "72",
        "40 + 32\n#### 72",
        r"it is \boxed{72}",
        "48 + 24\nThe answer is 72.",
        tag("72"),
    ]
    wrong = ["", "\n", "48 + 24 = 72", "#### 71\n#### 72", "72 <answer>", "72\n#### 71", "no idea"]
    assert [judge(text, require_tags=False) for text in right] == [1.0] * len(right)
    assert [judge(text, require_tags=False) for text in wrong] == [0.0] * len(wrong)


def test_another_tag_name_can_be_asked_for() -> None:
    assert judge("<final>72</final>", answer_tag="final") == 1.0
    assert judge(tag("72"), answer_tag="final") == 0.0


def test_a_gold_answer_that_is_no_number_is_compared_as_text() -> None:
    assert judge(tag(" paris. "), "Paris") == 1.0
    assert judge(tag("in Paris"), "Paris") == 0.0
    assert judge(tag(""), "Paris") == 0.0


@pytest.mark.parametrize(
    ("claim", "gold", "reward"),
    [
        ("x + 1", "1", 0.0), ("y + 5", "5", 0.0), ("x * 5", "5", 0.0), ("x - 1", "-1", 0.0),
        ("x^2+1", "x^2 + 1", 1.0), ("x + 1", "x+1", 1.0), ("x+2", "x + 1", 0.0),
    ],
)  # fmt: skip
def test_an_expression_is_not_the_number_in_it(claim: str, gold: str, reward: float) -> None:
    assert correctness(["p"], [f"<answer>{claim}</answer>"], [gold]) == [reward]


def test_a_decimal_gold_number_means_its_digits() -> None:
    assert parse_reference(0.1) == Fraction(1, 10)
    assert parse_reference(True) == "True"
    assert parse_reference("48 + 24 = 72\n#### 72") == 72
    assert judge(tag("1/10"), 0.1) == 1.0


NO_ANSWER = [None, nan, Decimal("nan"), "", " \n\t", [], (), [None, "", nan], {}]


@pytest.mark.parametrize("gold", NO_ANSWER, ids=repr)
def test_a_row_without_a_gold_answer_is_left_out_by_every_reward(gold: Any) -> None:
    said = ["", "<answer></answer>", "<answer>72</answer>", '{"a": 1}', "72"]
    for reward in (correctness, gsm8k, exact, closeness, json_fields, f1, rouge_l, bleu, lapdog):
        Scorer({"right": Reward(reward)}).check(
            {name: ["72", gold] for name in ("answer", "answers")}
        )
        assert reward(said, said, [gold] * 5) == [None] * 5, reward  # type: ignore[operator]
    assert read_tests(gold).tests == ""
    limit = 100
    assert cosine_length(said, said, [gold] * 5, [9] * 5, max_completion_length=limit) == [None] * 5


def test_a_worked_solution_with_an_empty_answer_has_none() -> None:
    for gold in ("48 + 24 = 72\n#### ", r"so \boxed{}", "<answer> </answer>"):
        assert judge(tag(""), gold) is None
        assert judge(tag("72"), gold) is None
    assert judge(tag("72"), ["####", "72"]) == 1.0
    for reward in (exact, closeness, f1, json_fields):
        assert reward(["?"], ["72"], ["#### "]) == [None], reward


def test_chat_messages_are_judged_like_text() -> None:
    message = [{"role": "assistant", "content": tag("72")}]
    assert correctness(["?"], [message], answer=["72"]) == [1.0]


def test_gsm8k_takes_any_mark_and_one_answer_only() -> None:
    worked = "48 + 24 = 72\n#### 72"
    right = [tag("72"), "40 + 32\n#### 72", r"it is \boxed{72}", "The answer is 72."]
    wrong = [
        "",
        "48 + 24 = 72",
        "#### 71\n#### 72",
        "#### 71",
        tag("71") + "\n72",
        "no idea",
    ]
    assert gsm8k(["?"] * 4, right, [worked] * 4) == [1.0] * 4
    assert gsm8k(["?"] * 6, wrong, [worked] * 6) == [0.0] * 6
    assert gsm8k(["?"], ["72"], [None]) == [None]


def test_exact_compares_every_character() -> None:
    def same(text: str, gold: object, **kwargs: Any) -> float | None:
        return exact(["?"], [text], [gold], **kwargs)[0]  # type: ignore[list-item]

    assert same(tag(" Foo_1 "), "Foo_1") == 1.0
    assert same(tag("foo_1"), "Foo_1") == 0.0
    assert same(tag("72.0"), 72) == 0.0
    assert same(tag("a") + tag("a"), "a") == 0.0  # said twice
    assert same("a", "a") == 0.0
    assert same("a\n", "a", answer_tag=None) == 1.0
    assert same("a", None) is None


def test_closeness_falls_linearly_with_the_relative_error() -> None:
    def near(text: str, gold: object = 200, **kwargs: Any) -> float | None:
        return closeness(["?"], [text], [gold], **kwargs)[0]  # type: ignore[list-item]

    claims = ["200", "$190", "210", "220", "0", "-200", "none", "190 or 210", ""]
    assert [near(tag(claim)) for claim in claims] == [1.0, 0.5, 0.5, 0, 0, 0, 0, 0, 0]
    assert near(tag("190") + tag("195")) == 0.0
    assert near("190", require_tags=False) == 0.5
    assert near(tag("0.05"), 0) == 0.5
    assert near(tag("1"), None) is None
    with raises_for("closeness", "answer", "Paris"):
        near(tag("1"), "Paris")
    with raises_for("tolerance"):
        near(tag("1"), tolerance=0)


@pytest.mark.parametrize("answer", ["-95", "-105"])
def test_closeness_is_relative_to_the_size_of_a_negative_number(answer) -> None:
    assert closeness(["?"], [tag(answer)], [-100]) == [0.5]


def group_digits(gold: str) -> str:
    return f"{int(gold):,}"


def with_minus_sign(gold: str) -> str:
    return gold.replace("-", "\u2212")


def as_dollars(gold: str) -> str:
    return f"-${gold[1:]}" if gold.startswith("-") else f"${gold}"


RENDERINGS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "grouped": group_digits,
    "grouped dollars": lambda gold: as_dollars(group_digits(gold)),
    "cents": lambda gold: f"{gold}.00",
    "grouped cents": lambda gold: f"{as_dollars(group_digits(gold))}.00",
    "percent": lambda gold: f"{gold}%",
    "unit": lambda gold: f"{group_digits(gold)} square miles",
    "sentence": lambda gold: f"The answer is {gold}.",
    "fraction": lambda gold: f"{2 * int(gold)}/2",
    "latex fraction": lambda gold: rf"$\frac{{{3 * int(gold)}}}{{3}}$",
    "boxed": lambda gold: rf"$\boxed{{{gold}}}$",
    "latex dollars": lambda gold: rf"\${gold}",
    "spaces": lambda gold: f"\n   {gold} \n",
    "minus sign": with_minus_sign,
    "thin spaces": lambda gold: group_digits(gold).replace(",", "\u202f"),
    "bold": lambda gold: f"**{gold}**",
    "exponent": lambda gold: f"{gold}e0",
    "plus": lambda gold: gold if gold.startswith("-") else f"+{gold}",
}


def test_no_gold_answer_of_gsm8k_fails_in_any_rendering() -> None:
    worked = [row["answer"] for row in GSM8K]
    golds = [answer.split("#### ")[1].replace(",", "") for answer in worked]
    off_by_one = [tag(str(int(gold) + 1)) for gold in golds]
    assert set(correctness(golds, [tag(gold) for gold in golds], answer=worked)) == {1.0}
    assert set(correctness(golds, off_by_one, answer=worked)) == {0.0}
    numbers = sorted(set(golds))
    for name, render in RENDERINGS.items():
        completions = [tag(render(number)) for number in numbers]
        assert set(correctness(numbers, completions, answer=numbers)) == {1.0}, name


def test_any_of_several_accepted_answers_is_right():
    golds = [["7", "seven"], ["7", "seven"], ["7", "seven"], [None, 7], [], None]
    said = ["7.0", "Seven", "8", "7", "7", "7"]
    texts = [f"<answer>{text}</answer>" for text in said]
    right = [1.0, 1.0, 0.0, 1.0, None, None]
    assert correctness(said, texts, golds) == right
    assert gsm8k(said, texts, golds) == right
    assert exact(said, texts, golds) == [0.0, 0.0, 0.0, 1.0, None, None]
    near = closeness(said, texts, [[10, 7.0], "7", ["seven", 7], (7, 9), [], None])
    assert near == [1.0, 0.0, 0.0, 1.0, None, None]
    with raises_for("closeness", "answer"):
        closeness(["p"], ["7"], [["seven"]])


def test_every_type_of_answer_that_data_sets_hold_can_be_a_reference() -> None:
    known = [True, Decimal("72.0"), 72.0, date(2024, 1, 2), nan, Decimal("0.50"), False]
    said = ["true", "72", "72", "2024-01-02", "1", ".5", "True"]
    texts = [f"<answer>{text}</answer>" for text in said]
    assert correctness(said, texts, known) == [1.0, 1.0, 1.0, 1.0, None, 1.0, 0.0]
    assert exact(said, texts, known) == [1.0, 1.0, 1.0, 1.0, None, 0.0, 0.0]


@pytest.mark.parametrize("bad", [{"a": 1}, object(), float("inf"), b"72", -float("inf")])
def test_an_answer_that_cannot_be_a_reference_is_rejected_before_training(bad: object) -> None:
    scorer = Scorer({"right": Reward(correctness)})
    with raises_for("right", "answer"):
        scorer.check({"answer": ["72", None, bad]})
    scorer.check({"answer": ["72", None, ["7", 8], True]})


library = pytest.importorskip("math_verify", reason="math-verify is not installed")

SAME = {
    r"\frac{1}{2}": "0.5", "1+x": "x+1", "(1,2)": "(1,2)", r"\{1,2\}": r"\{2,1\}",
    r"\sqrt{8}": r"2\sqrt{2}", "72": "72",
}  # fmt: skip


def verify(claims, golds):
    return math_verify(["?"] * len(claims), [f"<answer>{c}</answer>" for c in claims], golds)


def test_equal_formulas_are_equal_and_others_are_not() -> None:
    assert verify(list(SAME), list(SAME.values())) == [1.0] * len(SAME)
    assert verify(["x+2", "", "no idea", "(2,1)"], ["x+1", "1", "1", "(1,2)"]) == [0.0] * 4
    assert verify(["1"], [None]) == [None]


def test_it_works_outside_of_the_main_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.extend(verify(["x+1"], ["1+x"])))
    thread.start()
    thread.join()
    assert found == [1.0]


SLOW = [
    r"9^{9^{9^{9^{9}}}}", "9^9^9", "9^{9^9}", "(9^{9999})^{9999}", "(10^7)!", "10000000!",
    "((9!)!)!",
    r"\binom{10^7}{10^6}", r"\sum_{n=1}^{10^9} \frac{1}{n}", r"\prod_{k=1}^{10^6} k",
    r"\left(10^{7}\right)!",
]  # fmt: skip


def verify_in_workers(claims, golds):
    settings = Scoring(timeout_s=30.0, num_workers=2)
    scorer = Scorer({"same": Reward(math_verify)}, settings)
    texts = [f"<answer>{claim}</answer>" for claim in claims]
    table = scorer(["?"] * len(claims), texts, {"answer": golds}, len(claims))
    scorer.close()
    assert table.valid.all()
    return table.total.flatten().tolist()


def test_an_answer_that_cannot_be_judged_in_time_is_incorrect(monkeypatch) -> None:
    monkeypatch.setattr(math_verify, "row_timeout_s", 1.0)
    claims = [each for slow in SLOW for each in (slow, "1+x")]
    assert verify_in_workers(claims, ["x+1"] * len(claims)) == [0.0, 1.0] * len(SLOW)


def test_numbers_with_currency_and_units_are_compared_as_numbers() -> None:
    assert verify(["18", "18 dollars", "$18", r"\$18", "19"], [r"\$18"] * 5) == [1.0] * 4 + [0.0]
    assert verify(["18 dollars", "x+1"], ["18", r"$x+1$"]) == [1.0, 1.0]


def test_it_runs_in_a_worker_where_a_tower_of_powers_costs_only_its_row() -> None:
    assert not stays_in_process(Call("same", math_verify, {}, {}, 4))
    tower = r"9^{9^{9^{9^{9}}}}"
    assert verify_in_workers(["1+x", tower], ["x+1", f"{tower}-1"]) == [1.0, 0.0]
