from litgrpo.environments.in_process import InProcessPool
from litgrpo.environments.interface import Failed, Heard, Start
from tests.rollout.playing import Echo

STARTS = [Start({"prompt": text}, 5, (0, 0, n, 0)) for n, text in enumerate("ab")]


class Closing(Echo):
    closed: list[int] = []  # noqa: RUF012 (shared by the copies)

    def close(self):
        self.closed.append(self.seed)


def test_every_episode_is_played_by_a_copy_of_its_own():
    pattern = Closing(opening="go")
    pool = InProcessPool(pattern)
    assert pool.begin(STARTS) == ["go", "go"]
    pool.say(1, "hm")
    answers = pool.heard(wait=True)
    assert answers.keys() == {1}
    assert isinstance(answers[1], Heard)
    assert pool.heard(wait=False) == {}
    assert pattern.turns == pool.episodes[0].turns == []
    pool.begin(STARTS)
    assert pattern.closed == [5, 5]


class Broken(Echo):
    def reset(self, row, seed):
        if row["prompt"] == "b":
            raise ValueError("no\nb")
        return ""

    def step(self, said):
        return {"reward": 1} if said == "dict" else 1 / 0


def test_what_an_environment_raises_or_wrongly_returns_fails_its_episode_alone():
    pool = InProcessPool(Broken())
    assert pool.begin(STARTS) == ["", Failed("ValueError: no b")]
    pool.say(0, "dict")
    assert pool.heard(wait=True) == {0: Failed("step returned dict, not a Heard")}
    pool.say(0, "")
    assert pool.heard(wait=True) == {0: Failed("ZeroDivisionError: division by zero")}
