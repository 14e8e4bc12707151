from litgrpo.rewards.builtin.episode import environment


def test_an_episode_is_worth_the_sum_of_its_turns_and_abstains_where_all_do():
    assert environment("abc", "abc", [[1.0, None, 0.5], [None], []]) == [1.5, None, None]
