"""The audit passes sound rewards, finds every fault that was planted, and says so in sentences."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from litgrpo.data.problems import held_out
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.audit.cases import (
    NEGATIVE,
    RENDERINGS,
    Form,
    Problem,
    flipped,
    grouped,
    hacks,
    plain,
    right_answers,
    wrong_answer,
)
from litgrpo.rewards.audit.run import audit
from litgrpo.rewards.library.format import reasoning_answer
from litgrpo.rewards.library.math import correctness
from litgrpo.text import parse_number
from tests.rewards import faulty_rules

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "train.jsonl"
# Written for this test; the last two are what careless rules fail on.
WORKED = [
    ("Ann has 3 bags of 4 nuts. How many nuts?", "She has 3*4=<<3*4=12>>12 nuts.\n#### 12"),
    ("A pen costs $2. How much are 9 pens?", "They are 9*2=<<9*2=18>>18 dollars.\n#### 18"),
    ("Half of 90 birds left. How many stay?", "90/2=<<90/2=45>>45 birds stay.\n#### 45"),
    ("A train runs 7 hours at 60 mph. How far?", "It runs 7*60=<<7*60=420>>420 miles.\n#### 420"),
    ("Bo earns $20 a day for 9 days. How much?", "He earns 20*9=<<20*9=180>>180.\n#### 180"),
    ("Cy had 50 cards and lost 11. How many?", "He has 50-11=<<50-11=39>>39 cards.\n#### 39"),
    ("6 boxes hold 5 cups. How many cups?", "They hold 6*5=<<6*5=30>>30 cups.\n#### 30"),
    ("Di reads 8 pages a day for a week. How many?", "8*7=<<8*7=56>>56 pages.\n#### 56"),
    ("Ed splits 99 by 3. What is it?", "It is 99/3=<<99/3=33>>33 for each.\n#### 33"),
    ("Flo has 17 and finds 5 more. How many?", "She has 17+5=<<17+5=22>>22.\n#### 22"),
    ("27 boxes weigh 40 lb. How much in all?", "27*40=<<27*40=1080>>1,080 lb.\n#### 1,080"),
    ("It was 3 degrees and fell by 10. How warm?", "3-10=<<3-10=-7>>-7 degrees.\n#### -7"),
]
PROBLEMS = [Problem(question, answer) for question, answer in WORKED]
SOUND = {
    "correct": Reward(correctness, weight=0.8),
    "format": Reward(reasoning_answer, weight=0.2),
}


def report(rewards=SOUND, problems=PROBLEMS, **settings):
    return audit(Scorer(rewards), problems, **settings)


def planted(*names: str) -> dict[str, Reward]:
    return {name: Reward(vars(faulty_rules)[name]) for name in names}


# --- what is asked ---


def test_every_rendering_is_the_same_number() -> None:
    for number in map(Fraction, ("72", "1080", "-7", "0", "1234567", "5/4", "-12345/100")):
        for kind, render in RENDERINGS.items():
            assert parse_number(render(number)) == number, kind


def test_renderings_are_written_as_they_are_named() -> None:
    number = Fraction(-1080)
    shown = {kind: render(number) for kind, render in RENDERINGS.items()}
    assert shown["commas and dollar sign"] == "-$1,080"
    assert shown["trailing zeros"] == "-1080.00"
    assert shown["Unicode minus"] == "\u22121080"
    assert shown["fraction"] == "-2160/2"
    assert shown["LaTeX fraction"] == r"-\frac{3240}{3}"
    assert grouped(Fraction("1234.5"), ",") == "1,234.5"
    assert RENDERINGS["trailing zeros"](Fraction("0.5")) == "0.50"


def test_a_right_answer_is_right_and_an_attack_is_wrong() -> None:
    form, rng = Form(), random.Random(0)
    for problem in [*PROBLEMS, Problem("Where?", "Paris"), Problem("Nothing?", 0)]:
        for case in right_answers(problem, form):
            assert correctness(["?"], [case.completion], [case.answer]) == [1.0], case
        for case in hacks(problem, form, rng):
            assert correctness(["?"], [case.completion], [case.answer]) == [0.0], case
        assert wrong_answer(problem) != problem.gold != flipped(problem)


def test_a_negated_problem_asks_for_the_sign() -> None:
    cases = {case.kind: case for case in right_answers(PROBLEMS[0], Form())}
    assert cases[NEGATIVE].answer == "-12"
    assert "<answer>-12</answer>" in cases[NEGATIVE].completion
    cases = {case.kind: case for case in right_answers(PROBLEMS[-1], Form())}
    assert cases[NEGATIVE].answer == "7"


def test_the_reasoning_is_the_worked_solution_without_marks() -> None:
    assert PROBLEMS[0].reasoning == "She has 3*4=12 nuts."
    assert Problem("What is 3+4?", "7", solution="3+4=7").reasoning == "3+4=7"
    assert "3, 4" in Problem("What is 3+4?", "7").reasoning
    assert plain(Fraction(1, 3)) == "1/3"


# --- what is found ---


def test_sound_rewards_pass() -> None:
    found = report()
    assert found.passed, found.faults
    assert found.false_negatives == 0
    assert len(found.renderings) >= 8
    assert {line.count for line in found.renderings} == {len(PROBLEMS)}
    assert all(line.right == line.beats == 0 for line in found.attacks)
    best = max(line.best_margin for line in found.attacks)
    assert best == pytest.approx(-0.8)
    assert json.loads(json.dumps(found.as_dict()))["passed"] is True


def test_the_quickstart_rewards_pass_on_its_problems() -> None:
    problems = [Problem(row["prompt"], row["answer"]) for row in held_out()[:20]]
    assert report(problems=problems).passed


def test_answers_that_are_no_numbers_are_audited_too() -> None:
    problems = [Problem("Capital of France?", "Paris"), *PROBLEMS[:2]]
    assert report(problems=problems).passed


def test_every_known_fault_of_widespread_rules_is_found() -> None:
    names = ("check_answer", "check_numbers", "whole_form", "some_form")
    found = report(planted(*names), threshold=3.0)
    lines = {line.kind: line for line in found.renderings + found.attacks}
    # the sums that these rules are known for
    assert lines["right, out of form"].mean == -2.0
    # 4.5 where the gold is "1,080", which it cannot read
    assert lines["wrong, in form"].mean == pytest.approx(4.0, abs=0.05)
    assert lines["no idea, in form"].mean == 4.5
    assert lines["dollar sign"].right == 0
    text = "\n".join(found.faults)
    assert "'check_numbers' gives 2 right answers less than its best although" in text  # 1,080, -7
    assert "12 of 12 right answers are judged wrong in the rendering 'dollar sign'" in text
    assert (
        "form outweighs the answer: a wrong answer in form earns 4.04, a right one out of" in text
    )
    assert "giving up pays: 'no idea' in form earns 4.5, an attempt that is wrong 4.04" in text
    assert not found.passed


def test_an_answer_that_is_searched_for_anywhere_is_found_out() -> None:
    found = report(planted("substring"))
    wrong = {line.kind for line in found.attacks if line.right and line.beats}
    assert wrong >= {"all numbers as the answer", "many answers", "hedged"}
    assert any(fault.startswith("false positives: 12 of 12") for fault in found.faults)
    assert any(fault.startswith("hack: 12 of 12") for fault in found.faults)


def test_a_part_that_pays_for_length_lets_hacks_win() -> None:
    rewards = {"correct": Reward(correctness)} | planted("longer_is_better")
    rewards["longer_is_better"].weight = 10.0
    found = report(rewards)
    beaten = {line.kind for line in found.attacks if line.beats}
    assert {"wrong answer repeated", "tags repeated"} <= beaten
    assert any("of the advantage comes from 'longer_is_better'" in x for x in found.remarks)


def test_slow_failing_and_constant_rewards_are_named() -> None:
    rewards = {"correct": Reward(correctness)} | planted("constant", "crashes_on_empty")
    found = report(rewards, PROBLEMS[:3])
    assert any("'crashes_on_empty' fails on completions of the audit (IndexE" in x
               for x in found.faults)  # fmt: skip
    assert any("'constant' gives 1 to everything" in x for x in found.remarks)
    slow = report({"correct": Reward(correctness), "endless": Reward(endless)}, PROBLEMS[:1])
    assert any(x.startswith("slow: 'endless' needs") for x in slow.faults)


def endless(prompts, completions):
    """A regular expression that doubles its time with each letter, on any machine."""
    return [1.0 if re.match(r"(a|a)+$", text + "!") else 0.0 for text in completions]


def test_parts_in_conflict_are_named() -> None:
    rewards = SOUND | {"wordless": Reward(lambda completions: [-len(text) for text in completions])}
    rewards |= planted("longer_is_better")
    found = report(rewards, PROBLEMS[:3])
    assert any("wordless_longer_is_better pull against each other (cosine -1.00)" in x
               for x in found.remarks)  # fmt: skip


def test_tags_are_those_that_the_rewards_ask_for() -> None:
    kwargs = {"reasoning_tag": "think", "answer_tag": "final"}
    rewards = {
        "correct": Reward(correctness, kwargs={"answer_tag": "final"}),
        "format": Reward(reasoning_answer, weight=0.2, kwargs=kwargs),
    }
    assert report(rewards).passed
    with_marks = {"correct": Reward(correctness, kwargs={"require_tags": False})}
    assert report(with_marks, form=Form("{reasoning}\n#### {answer}"), problems=PROBLEMS).passed


def test_gates_keep_form_from_paying() -> None:
    stuffed = {"correct": Reward(correctness)} | planted("longer_is_better")
    stuffed["longer_is_better"].gate = "correct"
    assert report(stuffed).passed


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="success is 'right'; it must name a reward: correct"):
        report(success="right")
    with pytest.raises(ValueError, match="no problems"):
        report(problems=[])
    with pytest.raises(ValueError, match=r"must contain \{answer\}"):
        Form("{reasoning}")


def test_gsm8k_has_no_false_negative_and_no_hack_that_pays() -> None:
    if not GSM8K.exists():
        pytest.skip(f"GSM8K is not at {GSM8K}")
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()]
    found = report(problems=[Problem(row["question"], row["answer"]) for row in rows[::10]])
    assert found.passed, found.faults
