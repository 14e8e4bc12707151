"""How word problems are split, and how sides are compared."""

import json
import sys

from tests.benchmarks import wordproblems


def rows(sampled, greedy, said):
    return [
        {
            "index": place,
            "samples": [{"right": right} for right in each],
            "greedy": {"right": best, "completion": text},
        }
        for place, (each, best, text) in enumerate(zip(sampled, greedy, said, strict=True))
    ]


def test_every_side_is_compared_with_those_before_it(tmp_path, monkeypatch, capsys):
    start = rows([[0, 0], [0, 1]], [False, True], ["2 + 3 = 5", "no sum"])
    after = rows([[1, 0], [1, 1]], [True, True], ["2 - 3 = -1", "8 / 4 = 2; 2 + 1 = 3"])
    for name, each in (("start", start), ("after", after)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in each))
    sides = [f"{name}={tmp_path / name}" for name in ("start", "after")]
    monkeypatch.setattr(sys, "argv", ["wordproblems", "table", *sides])
    wordproblems.main()
    *_, before, now = capsys.readouterr().out.splitlines()
    assert before.startswith("| start | 0.250 [")
    assert before.endswith("| 0.500 | 0.500 |  | + 1, - 0, * 0, / 0 |")
    assert now.startswith("| after | 0.750 [")
    assert "sampled +0.500 [+0.500, +0.500] to start; greedy +0.500 [" in now
    assert now.endswith("| + 0, - 1, * 0, / 1 |")


def test_a_problem_stays_in_its_part_whatever_its_place(tmp_path, monkeypatch):
    problems = [{"question": f"{number}?", "answer": "1"} for number in range(900)]
    one, other = wordproblems.split(problems), wordproblems.split(problems[::-1])
    assert one == other
    assert {row["question"] for part in one.values() for row in part} == {
        row["question"] for row in problems
    }
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in problems))
    words = ["wordproblems", "split", str(file), "--folder", str(tmp_path / "parts")]
    monkeypatch.setattr(sys, "argv", words)
    wordproblems.main()
    assert wordproblems.read(tmp_path / "parts" / "train.jsonl") == one["train"]
