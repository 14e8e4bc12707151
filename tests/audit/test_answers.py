"""The audit passes sound rewards and finds every planted fault."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml

from litgrpo.audit.answers import audit_rewards
from litgrpo.audit.cases import HONEST, AnswerFormat, Problem
from litgrpo.data.examples.problems import held_out
from litgrpo.rewards import Reward, Scorer
from litgrpo.rewards.builtin.format import reasoning_answer
from litgrpo.rewards.builtin.length import length
from litgrpo.rewards.builtin.math import correctness, exact
from tests.oracle.reference import GSM8K
from tests.rewards import faulty_rules
from tests.support.cases import PROBLEMS

ROOT = Path(__file__).parents[2]
SOUND = {
    "correct": Reward(correctness, weight=0.8),
    "format": Reward(reasoning_answer, weight=0.2),
}


def report(rewards=SOUND, problems=PROBLEMS, **settings):
    return audit_rewards(Scorer(rewards), problems, **settings)


def kinds(found):
    """All kinds of completions of a report, as one table."""
    return pd.concat([found.tables["correct answer"], found.tables["everything else"]])


def faulty_rewards(*names: str) -> dict[str, Reward]:
    return {name: Reward(getattr(faulty_rules, name)) for name in names}


def test_sound_rewards_pass() -> None:
    found = report()
    assert found.passed, found.faults
    variants, exploits = found.tables["correct answer"], found.tables["everything else"]
    assert found.numbers["false_negatives"] == 0
    assert len(variants) >= 8
    assert set(variants["count"]) == {len(PROBLEMS)}
    assert not exploits[["correct", "beats", "equals"]].to_numpy().any()
    assert exploits["best_margin"].max() == pytest.approx(-0.8)
    assert json.loads(json.dumps(found.as_dict()))["passed"] is True


def test_the_quickstart_rewards_pass_on_its_problems() -> None:
    problems = [Problem(row["prompt"], row["answer"]) for row in held_out()[:20]]
    assert report(problems=problems).passed


def test_answers_that_are_no_numbers_are_audited_too() -> None:
    problems = [Problem("Capital of France?", "Paris"), *PROBLEMS[:2]]
    assert report(problems=problems).passed


def test_every_known_fault_of_widespread_rules_is_found() -> None:
    names = ("check_answer", "check_numbers", "whole_form", "some_form")
    found = report(faulty_rewards(*names), threshold=3.0)
    lines = kinds(found)
    # the sums that these rules are known for
    assert lines["mean"]["correct, malformed"] == -2.0
    # 4.5 if the reference answer is "1,080", which it cannot read
    assert lines["mean"]["incorrect, in format"] == pytest.approx(4.0, abs=0.05)
    assert lines["mean"]["no idea, in format"] == 4.5
    assert lines["correct"]["dollar sign"] == 0
    text = "\n".join(found.faults)
    assert (
        "'check_numbers' gives 2 correct answers less than its best although" in text
    )  # 1,080, -7
    assert "12 of 12 correct answers are judged incorrect in the variant 'dollar sign'" in text
    assert "the format outweighs the answer: an incorrect answer in format earns 4.04" in text
    assert "giving up pays: 'no idea' in format earns 4.5, an incorrect attempt 4.04" in text
    assert not found.passed


def test_a_reward_that_searches_the_whole_completion_is_a_fault() -> None:
    found = report(faulty_rewards("substring"))
    table = found.tables["everything else"]
    wrong = table[(table["correct"] > 0) & (table["beats"] + table["equals"] > 0)].index
    assert {*wrong} >= {"all numbers as the answer", "many answers", "hedged"}
    both = "is judged correct in 12 of 12 cases, paid as a correct answer in 12 of 12, such as '"
    (fault,) = [fault for fault in found.faults if fault.startswith("exploit: 'hedged'")]
    assert fault.startswith(f"exploit: 'hedged' {both}")


def test_a_part_that_pays_for_length_lets_exploits_win() -> None:
    rewards = {"correct": Reward(correctness)} | faulty_rewards("longer_is_better")
    rewards["longer_is_better"].weight = 10.0
    found = report(rewards)
    table = found.tables["everything else"]
    beaten = table[table["beats"] + table["equals"] > 0].index
    assert {"incorrect answer repeated", "tags repeated"} <= {*beaten}
    assert any("of the advantage comes from 'longer_is_better'" in x for x in found.remarks)


def test_slow_failing_and_constant_rewards_are_named(worker_processes) -> None:
    rewards = {"correct": Reward(correctness)} | faulty_rewards("constant", "crashes_on_empty")
    found = report(rewards, PROBLEMS[:3])
    assert any("'crashes_on_empty' fails on completions of the audit (IndexE" in x
               for x in found.faults)  # fmt: skip
    assert any("'constant' gives 1 to every completion" in x for x in found.remarks)
    slow = report({"correct": Reward(correctness), "endless": Reward(endless)}, PROBLEMS[:1])
    assert any(x.startswith("slow: 'endless' needs") for x in slow.faults)


def endless(prompts, completions):
    """A regular expression that doubles its time with each letter, on any machine."""
    return [1.0 if re.match(r"(a|a)+$", text + "!") else 0.0 for text in completions]


def test_a_reward_that_accepts_everything_is_one_fault() -> None:
    found = report(faulty_rewards("constant"))
    assert found.faults == [
        "false positives: 'constant' judges every completion as correct, even an empty one"
    ]


@pytest.mark.parametrize("also_correct", [{}, {"correct": Reward(correctness, weight=2.0)}])
def test_a_reward_that_always_fails_is_one_fault_and_neither_constant_nor_strict(
    also_correct,
) -> None:
    found = report(also_correct | {"broken": Reward(broken)}, PROBLEMS[:2])
    (fault,) = found.faults
    assert fault.startswith("failures: 'broken' fails on completions of the audit (Runtim")
    assert not any("broken" in remark for remark in found.remarks)


def broken(completions):
    raise RuntimeError("no server")


def test_a_reward_without_any_score_is_a_fault_if_it_decides_and_else_a_remark() -> None:
    unscored = {"unscored": Reward(lambda completions: [None for _ in completions])}
    sentence = "no reward: 'unscored' gives no completion a score (None)"
    found = report(unscored, PROBLEMS[:2])
    assert (found.faults, "constant" in str(found.remarks)) == ([sentence], False)
    unscored["unscored"].weight = 0.1
    found = report(SOUND | unscored, PROBLEMS[:2])
    assert (found.faults, sentence in found.remarks) == ([], True)


def test_a_reward_below_the_threshold_names_the_threshold() -> None:
    near = Reward(lambda completions: [-abs(20 - len(text)) - 1.0 for text in completions])
    (fault,) = report({"near": near}).faults
    assert "'near' judges no completion as correct: the highest reward is -" in fault
    assert "a correct answer needs 1; set --success_threshold, or --success_reward" in fault


TEXTS = [Problem("Capital of France?", "Paris"), Problem("As JSON?", '{"a": [1, 2], "b": "x"}')]


def test_text_that_must_be_exact_is_a_remark_and_a_number_in_other_digits_a_fault() -> None:
    found = report({"exact": Reward(exact)}, TEXTS)
    assert (found.passed, found.numbers["false_negatives"]) == (True, 0), found.faults
    assert [remark for remark in found.remarks if remark.startswith("exact text")] == [
        "exact text: correct answers with other characters around them are judged incorrect "
        "(full stop 2, bold text 2, boxed text 2 of 2)"
    ]
    found = report({"exact": Reward(exact)}, [Problem("How many?", "12"), *TEXTS])
    assert any("1 of 1 correct answers are judged incorrect in the variant 'trailing zeros'" in x
               for x in found.faults)  # fmt: skip
    # Another reward than the deciding one, too.
    rewards = {"correct": Reward(correctness), "exact": Reward(exact, weight=0.1)}
    assert report(rewards, TEXTS[:1]).passed
    (fault,) = report(rewards, [Problem("How many?", "12")]).faults
    assert fault.startswith("false negatives: 'exact' gives less than its best in the variants ")


def test_text_that_is_rejected_as_in_the_data_or_with_spaces_is_a_fault() -> None:
    def rejects(what):
        def judge(completions, answer):
            texts = [
                text.partition("<answer>")[2].partition("</answer>")[0] for text in completions
            ]
            right = zip(texts, answer, strict=True)
            return [float(text.strip() == gold and what not in text) for text, gold in right]

        return {"exact": Reward(judge)}

    for what in ("Paris", "  "):
        faults = report(rejects(what), TEXTS).faults
        variant = HONEST if what == "Paris" else "spaces"
        assert any(f"judged incorrect in the variant '{variant}'" in fault for fault in faults)


def test_a_constant_reward_leaves_the_other_one_no_competitor_to_dominate() -> None:
    found = report({"correct": Reward(correctness)} | faulty_rewards("constant"))
    assert [remark.partition(":")[0] for remark in found.remarks] == ["constant"]


def test_parts_in_conflict_are_named() -> None:
    rewards = SOUND | {"wordless": Reward(lambda completions: [-len(text) for text in completions])}
    rewards |= faulty_rewards("longer_is_better")
    found = report(rewards, PROBLEMS[:3])
    assert any("wordless_longer_is_better have opposed advantages (cosine -1.00)" in x
               for x in found.remarks)  # fmt: skip


def test_tags_are_those_that_the_rewards_ask_for() -> None:
    kwargs = {"reasoning_tag": "think", "answer_tag": "final"}
    rewards = {
        "correct": Reward(correctness, kwargs={"answer_tag": "final"}),
        "format": Reward(reasoning_answer, weight=0.2, kwargs=kwargs),
    }
    assert report(rewards).passed
    with_marks = {"correct": Reward(correctness, kwargs={"require_tags": False})}
    assert report(
        with_marks, answer_format=AnswerFormat("{reasoning}\n#### {answer}"), problems=PROBLEMS
    ).passed


def test_a_gate_prevents_reward_for_length_alone() -> None:
    stuffed = {"correct": Reward(correctness)} | faulty_rewards("longer_is_better")
    stuffed["longer_is_better"].gate = "correct"
    assert report(stuffed).passed


def test_a_correct_answer_below_the_best_by_rounding_is_accepted() -> None:
    def round_off(completions, answer):
        right = correctness(completions, completions, answer)
        return [value * (0.3 if "$" in text else 0.1 + 0.2)
                for value, text in zip(right, completions, strict=True)]  # fmt: skip

    found = report({"correct": Reward(correctness), "rounded": Reward(round_off)})
    assert found.passed, found.faults
    assert found.tables["reward"]["unfair"]["rounded"] == {}


def test_an_exploit_below_a_correct_answer_by_rounding_is_a_fault() -> None:
    rewards = {"correct": Reward(correctness), "undone": Reward(undone, weight=1.0)}
    found = report(rewards)
    table = found.tables["everything else"]
    assert (table["beats"] + table["equals"] == table["count"]).all()


def undone(prompts, completions, answer):
    """Takes back what being right adds, but for rounding."""
    right = correctness(prompts, completions, answer)
    return [1.0 - 1e-8 - value + 1e-8 * value for value in right]


def test_a_length_limit_that_few_long_solutions_exceed_is_no_fault() -> None:
    long = Problem("How many are four and four?", "So it is. " * 45 + "\n#### 8")
    rewards = SOUND | {"length": Reward(length, weight=0.1, kwargs={"max_tokens": 150})}
    found = report(rewards, [*PROBLEMS, long])
    assert found.passed, found.faults
    means = kinds(found)["mean"]
    assert 0 < means["no idea, in format"] - means["incorrect, in format"] < 0.005


def test_invalid_settings_raise() -> None:
    with pytest.raises(ValueError, match="success_reward is 'right'"):
        report(success="right")
    with pytest.raises(ValueError, match="no problems"):
        report(problems=[])


def test_the_rewards_of_the_gsm8k_recipe_pass() -> None:
    recipe = yaml.safe_load((ROOT / "configs" / "gsm8k_small.yaml").read_text())
    given = recipe["model"]["init_args"]["rewards"]
    problems = [Problem(row["question"], row["answer"]) for row in GSM8K]
    found = report({name: Reward(**part) for name, part in given.items()}, problems)
    assert found.passed, found.faults


def test_gsm8k_has_no_false_negative_and_no_exploit_that_pays() -> None:
    found = report(problems=[Problem(row["question"], row["answer"]) for row in GSM8K])
    assert found.passed, found.faults
