from litgrpo.tools.report.panels import panels, part_names


def test_numbers_that_belong_together_share_a_chart():
    names = ["val/avg@4", "val/pass@4", "val/greedy", "val/avg@4_low", "val/avg@4_high"]
    names += ["reward/mean", "reward/correct", "reward/correct_std", "reward/correct_share"]
    found = {
        title: [line.name for line in lines]
        for title, lines, _ in panels({name: [(0, 0.5), (1, 1.0)] for name in names})
    }
    assert found == {
        "Held-out accuracy": ["val/avg@4", "val/greedy", "val/pass@4"],
        "Reward in training": ["reward/mean"],
        "Reward parts": ["reward/correct"],
        "What moves the reward": ["reward/correct_share"],
    }


def test_a_line_has_its_interval_and_a_chart_its_meaning():
    series = {"val/avg@4": [(0, 0.5)], "val/avg@4_low": [(0, 0.4)], "val/avg@4_high": [(0, 0.6)]}
    ((_, (line,), about),) = panels(series)
    assert (line.low, line.high) == ([(0, 0.4)], [(0, 0.6)])
    assert "Share of right completions" in about


def test_statistics_of_the_reward_are_no_parts():
    names = ("reward/mean", "reward/std", "reward/group_std", "reward/a", "reward/a_std")
    assert part_names({name: [] for name in names}) == ["a"]
