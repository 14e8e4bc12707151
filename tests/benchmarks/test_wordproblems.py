"""Word problems are split, and sides compared."""

import json
import sys

from tests.benchmarks import wordproblems


def rows(sampled, greedy, said):
    return [
        {
            "index": place,
            "samples": [{"correct": right} for right in each],
            "greedy": {"correct": best, "completion": text},
            "columns": {"solution": "2 + 3 = 5"} if place else {},
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
    assert before.endswith(
        "| 0.500 | 0.500 |  | 0.00, 0.00 | + 1, - 0, * 0, / 0 | 0.000 | 1.000 of 1 |"
    )
    assert now.startswith("| after | 0.750 [")
    assert "sampled +0.500 [+0.500, +0.500] to start; greedy +0.500 [" in now
    assert now.endswith("| 0.00, 0.00 | + 0, - 1, * 0, / 1 | 0.000 | 1.000 of 2 |")


def test_what_was_said_to_a_calculator_counts():
    asked = {
        "completion": "#### 5",
        "correct": True,
        "calls": {"calculate": [1, 0]},
        "messages": [
            {"role": "assistant", "content": "<call>2 + 3</call>"},
            {"role": "user", "content": "<res>5</res>"},
            {"role": "assistant", "content": "#### 5"},
        ],
    }
    alone = {"completion": "2 + 3 = 6\n#### 6", "correct": False, "calls": {}}
    row = {"samples": [asked, alone], "columns": {"solution": "2 + 3 = 5"}}
    assert wordproblems.how([row | {"greedy": asked}]) == [
        "0.50, 1.00",
        "+ 1, - 0, * 0, / 0",
        "1.000",
        "",
    ]
    assert wordproblems.how([row | {"greedy": alone}])[-1] == "0.000 of 1"


def test_a_problem_stays_in_its_part_whatever_its_place(tmp_path, monkeypatch):
    own = {"answer": "3", "solution": "1 + 2 = 3"}
    problems = [{"question": f"{number}?", **own} for number in range(1400)]
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
    for name, rows in one.items():
        kept = wordproblems.read(tmp_path / "parts" / f"{name}.jsonl")
        assert [row["question"] for row in kept] == [row["question"] for row in rows]
    shown = [
        [each["content"] for each in row["completion"]]
        for row in wordproblems.read(tmp_path / "parts" / "demonstrations.jsonl")
    ]
    assert shown[:2] == [["<call>1 + 2</call>", "<res>3</res>", "#### 3"], ["1 + 2 = 3\n#### 3"]]
    assert sum(len(said) > 1 for said in shown) == 548 / 4
    monkeypatch.setattr(sys, "argv", [*words, "--calls", "0"])
    wordproblems.main()
    plain = wordproblems.read(tmp_path / "parts" / "demonstrations.jsonl")
    assert {len(row["completion"]) for row in plain} == {1}
