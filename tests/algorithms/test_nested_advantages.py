"""Every advantage estimator in every other one, two deep: it raises when built, or is exact.

`combine_by_hand` returns values and the completions that have one. Single estimators are tested in
`test_advantages` and `test_turns`.
"""

from itertools import product

import pytest
import torch

from litgrpo.algorithms.advantages import (
    GDPO,
    GFPO,
    Advantages,
    Normalized,
    OptimalTokenBaseline,
    PassAtK,
    ReMax,
    TaskAdvantages,
    Whitened,
)
from litgrpo.algorithms.kl import KLInReward
from litgrpo.algorithms.objective import Objective
from litgrpo.algorithms.turns import (
    GTPO,
    MTGRPO,
    GiGPO,
    ReBN,
    SimpleTIR,
    TurnAdvantages,
    Turns,
)
from litgrpo.distributed.collectives import SingleProcess
from litgrpo.types import RewardTable
from tests.support.raises import raises_for

WRAPPERS = {
    "GFPO": lambda inner: GFPO(keep_frac=0.5, advantages=inner),
    "Whitened": lambda inner: Whitened(inner, eps=0.0),
    "TaskAdvantages": lambda inner: TaskAdvantages({"math": inner}, others=inner),
    "SimpleTIR": lambda inner: SimpleTIR(advantages=inner),
}
ESTIMATORS = {
    "Normalized": Normalized,
    "Normalized(batch)": lambda: Normalized("batch", "batch"),
    "ReMax": ReMax,
    "GDPO": GDPO,
    "PassAtK": PassAtK,
    "OptimalTokenBaseline": OptimalTokenBaseline,
    "GiGPO": GiGPO,
    "MTGRPO": MTGRPO,
    "GTPO": GTPO,
    "ReBN": ReBN,
}
WITHOUT_COMPLETIONS = {"OptimalTokenBaseline", "GiGPO", "MTGRPO", "GTPO", "ReBN"}
CHAINS = [
    *((wrapper, name) for wrapper, name in product(WRAPPERS, ESTIMATORS)),
    *product(WRAPPERS, WRAPPERS, ESTIMATORS),
]
# Two groups of four; the last completion of the first one has no valid reward.
FORMAT = torch.tensor([[0.0, 1.0, 0.0, 5.0], [1.0, 1.0, 0.0, 0.5]]).double()
CORRECT = torch.tensor([[1.0, 0.25, 0.5, 9.0], [0.0, 2.0, 1.0, 3.0]]).double()
VALID = torch.tensor([[True, True, True, False], [True, True, True, True]])
LENGTHS = torch.tensor([[2, 1, 3, 4], [1, 1, 2, 5]])
VOID = torch.tensor([[True, False, False, False], [False, False, True, False]])
TABLE = RewardTable(
    components={"format": FORMAT, "correct": CORRECT},
    weights={"format": 1.0, "correct": 2.0},
    total=FORMAT + 2 * CORRECT,
    valid=VALID,
    greedy=torch.tensor([0.3, 1.0]).double(),
    tasks=["math", "math"],
)


def build(chain) -> Advantages:
    *wrappers, name = chain
    estimator = ESTIMATORS[name]()
    for wrapper in reversed(wrappers):
        estimator = WRAPPERS[wrapper](estimator)
    return estimator


def turns() -> Turns:
    """One turn of every token of an episode, with the episode's reward, and void episodes."""
    number = torch.zeros(8, 5).long().masked_fill(torch.arange(5) >= LENGTHS.view(-1, 1), -1)
    exist = torch.ones(2, 4, 1, dtype=torch.bool)
    states = torch.zeros(2, 4, 1).long()
    return Turns(number, exist, TABLE.total[..., None], states, VOID, [None] * 8)


def combine_by_hand(chain):
    """[2, 4] advantages by hand, and [2, 4] True for completions that have one."""
    outer, *inner = chain
    if not inner:
        return build(chain)(TABLE, LENGTHS, SingleProcess()), VALID
    values, has = combine_by_hand(inner)
    match outer:
        case "GFPO":  # the two of highest reward; none are equal
            ranked = TABLE.total.masked_fill(~VALID, -torch.inf).argsort(1).argsort(1)
            return values, has & (ranked >= 2)
        case "SimpleTIR":
            return values, has & ~VOID
        case "Whitened":
            rows = zip(values.flatten(), LENGTHS.flatten(), has.flatten(), strict=True)
            tokens = torch.stack([a for a, length, one in rows if one for _ in range(length)])
            return (values - tokens.mean()) / tokens.std(), has
    return values, has


@pytest.mark.parametrize("chain", CHAINS, ids=" ".join)
def test_a_nested_estimator_raises_when_built_or_has_the_advantages_of_its_parts(chain):
    *wrappers, name = chain
    lost = [*wrappers[1:], name]  # parts inside of another one
    if {"SimpleTIR", *WITHOUT_COMPLETIONS} & {*lost}:
        with raises_for("model.objective.advantages"):
            build(chain)
        return
    estimator = build(chain)
    values, has = combine_by_hand(chain)
    rewards = torch.where(has, values, 0.0)

    mask = torch.arange(5) < LENGTHS.view(-1, 1)
    found = Objective(estimator).token_advantages(TABLE, mask, turns=turns())
    torch.testing.assert_close(found.double(), rewards.view(-1, 1) * mask, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chain", [(name,) for name in ESTIMATORS] + CHAINS, ids=" ".join)
def test_a_kl_in_the_reward_is_rejected_if_an_estimator_does_not_use_the_total(chain):
    *wrappers, name = chain
    if {"SimpleTIR", *WITHOUT_COMPLETIONS} & {*wrappers[1:], *([name] if wrappers else [])}:
        return  # cannot be built
    estimator = build(chain)
    if name == "GDPO":
        with raises_for("kl_in_reward", "GDPO"):
            Objective(estimator, kl_in_reward=KLInReward())
        return
    assert Objective(estimator, kl_in_reward=KLInReward()).advantages is estimator


def test_one_of_several_estimators_decides_for_all():
    mixed = TaskAdvantages({"a": Whitened(GDPO())}, others=Normalized())
    with raises_for("kl_in_reward", "GDPO"):
        Objective(GFPO(advantages=mixed), kl_in_reward=KLInReward())
    with raises_for("GTPO", "others", "turn"):
        TaskAdvantages({"a": Normalized()}, others=GTPO())
    assert Whitened(TaskAdvantages({"a": ReMax()})).needs_greedy
    assert not Whitened(TaskAdvantages({"a": Normalized()})).needs_greedy


def test_an_estimator_needs_a_group_if_a_part_of_it_does():
    of_batch = Normalized("batch", "batch")
    assert not SimpleTIR(advantages=of_batch).needs_group
    assert not Whitened(TaskAdvantages({"a": ReMax()}, others=of_batch)).needs_group
    assert Whitened(TaskAdvantages({"a": Normalized()}, others=of_batch)).needs_group
    assert SimpleTIR(advantages=Whitened(PassAtK())).needs_group
    assert GFPO(advantages=of_batch).needs_group  # which it ranks
    assert Normalized().needs_group


def test_an_estimator_of_the_users_own_is_checked_with_the_objective():
    class Halved(Advantages):
        def __init__(self, inner):
            self.inner = inner

        def estimate(self, groups):
            return self.inner.estimate(groups) / 2

    with raises_for("ReBN", "inner", "Halved"):
        Objective(Halved(ReBN()))
    with raises_for("kl_in_reward"):
        Objective(Halved(GDPO()), kl_in_reward=KLInReward())
    assert Halved(ReMax()).needs_greedy
    assert isinstance(SimpleTIR(advantages=Halved(Normalized())), TurnAdvantages)


def test_gfpo_normalizes_only_what_it_keeps_by_the_reward_functions_of_gdpo():
    found = GFPO(0.5, "shortest", normalize_kept_only=True, advantages=GDPO(eps=0.0))
    lengths = torch.tensor([[1, 1, 9, 9], [1, 1, 9, 9]])
    kept = RewardTable(
        {"format": FORMAT[:, :2], "correct": CORRECT[:, :2]},
        TABLE.weights,
        TABLE.total[:, :2],
        VALID[:, :2],
    )
    alone = GDPO(eps=0.0)(kept, lengths[:, :2], SingleProcess())
    values = found(TABLE, lengths, SingleProcess())
    torch.testing.assert_close(values[:, :2], alone)
    assert values[:, 2:].tolist() == [[0.0, 0.0], [0.0, 0.0]]
