import threading

import pytest

from litgrpo.rewards import ProcessRunner, Reward, Scorer
from litgrpo.rewards.builtin.verify import math_verify
from litgrpo.rewards.runner.calls import Call
from litgrpo.rewards.runner.process_runner import is_trusted

library = pytest.importorskip("math_verify", reason="math-verify is not installed")

SAME = {
    r"\frac{1}{2}": "0.5", "1+x": "x+1", "(1,2)": "(1,2)", r"\{1,2\}": r"\{2,1\}",
    r"\sqrt{8}": r"2\sqrt{2}", "72": "72",
}  # fmt: skip


def judge(claims, golds):
    return math_verify(["?"] * len(claims), [f"<answer>{c}</answer>" for c in claims], golds)


def test_equal_formulas_are_equal_and_others_are_not() -> None:
    assert judge(list(SAME), list(SAME.values())) == [1.0] * len(SAME)
    assert judge(["x+2", "", "no idea", "(2,1)"], ["x+1", "1", "1", "(1,2)"]) == [0.0] * 4
    assert judge(["1"], [None]) == [None]


def test_it_works_outside_of_the_main_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.extend(judge(["x+1"], ["1+x"])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_it_runs_in_a_worker_where_a_tower_of_powers_costs_only_its_row() -> None:
    runner = ProcessRunner(timeout_s=30.0, workers=2)
    scorer = Scorer({"same": Reward(math_verify)}, runner=runner)
    texts = ["<answer>1+x</answer>", r"<answer>9^{9^{9^{9^{9}}}}</answer>"] * 2
    columns = {"answer": ["x+1", r"9^{9^{9^{9^{9}}}}-1"] * 2}
    assert not is_trusted(Call("same", math_verify, {}, {}, 4))
    table = scorer(["?"] * 4, texts, columns, 2)
    assert table.valid[:, 0].all()
    assert (table.total[:, 0] == 1.0).all()
    runner.close()
