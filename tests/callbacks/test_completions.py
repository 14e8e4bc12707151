import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from litgrpo.callbacks.completions import (
    Completions,
    completion_rows,
    completion_table,
    episode_row,
    episode_table,
    format_episode,
    format_first_groups,
    histograms,
    log_tables,
)
from litgrpo.text.tables import escape_cell
from litgrpo.types import RewardTable
from tests.support.episodes import SAID, rows_of_episodes
from tests.support.fitting import fit
from tests.support.standin import StandIn, prompts, rewards_of, rollout_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*eval mode", "ignore:.*LeafSpec"
)


def test_a_row_describes_a_completion():
    rollout = rollout_of(prompts("A", "B"))
    rewards = rewards_of(rollout)
    rows = completion_rows(7, rollout, rewards, rewards.total - 0.5)
    assert rows[3] == {
        "iteration": 7,
        "prompt": "B",
        "completion": "<answer>3</answer>",
        "reward": 0.0,
        "rewards": {"correct": 0.0, "format": 1.0},
        "advantage": -0.5,
        "length": 3,
        "truncated": False,
        "columns": {"answer": "1"},
    }
    assert rows[0]["rewards"]["format"] is None  # NaN: the function abstained


def test_an_unscored_completion_has_no_reward_in_rows_histograms_and_the_terminal():
    rollout = rollout_of(prompts("A", "B"))
    rewards = rewards_of(rollout)
    rewards.valid[0, 0] = rewards.valid[1, 1] = False
    rewards.total[~rewards.valid] = 0.0  # as the scorer has it
    advantages = torch.tensor([[0.0, 0.5], [-0.5, 0.0]])
    rows = completion_rows(7, rollout, rewards, advantages)
    assert [row["reward"] is None for row in rows] == [True, False, False, True]
    shown = histograms(rollout, rewards, advantages)
    assert shown["policy/advantage_distribution"].tolist() == [0.5, -0.5]
    assert len(shown["reward/distribution"]) == 2
    text = format_first_groups(rewards, advantages, 1).splitlines()[0]
    assert text == f"group 0: rewards      none {float(rewards.total[0, 1]):6.2f}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a|b", "a&#124;b"),
        ("one\ntwo\r\n", "one<br>two<br>"),
        ("<reasoning>2*3</reasoning>", "&lt;reasoning&gt;2&#42;3&lt;/reasoning&gt;"),
        ("a_b_c `x` \\n", "a&#95;b&#95;c &#96;x&#96; &#92;n"),
        ("1 & 2", "1 &amp; 2"),
    ],
)
def test_a_markdown_cell_shows_text_literally(text, shown):
    assert escape_cell(text) == shown


def render_logged_table(name, table):
    """Lines of a table in TensorBoard."""
    texts = {}
    board = SimpleNamespace(add_text=lambda name, text, step: texts.update({name: text}))
    logger = Mock(spec=TensorBoardLogger, experiment=board)
    log_tables(SimpleNamespace(loggers=[logger]), {name: table}, 1)
    return texts[name].splitlines()


def test_the_table_has_one_line_per_completion():
    rollout = rollout_of(prompts("1|1"))
    unknown = torch.full((1, 2), torch.nan)
    rows = completion_rows(1, rollout, rewards_of(rollout), unknown)
    assert render_logged_table("completions", completion_table(rows)) == [
        "| prompt | completion | correct | format | reward | advantage |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 1&#124;1 | &lt;answer&gt;0&lt;/answer&gt; | 1 |  | 1 |  |",
        "| 1&#124;1 | &lt;answer&gt;1&lt;/answer&gt; | 0 | 1 | 0 |  |",
    ]


def test_tensorboard_gets_a_table_and_histograms_at_due_iterations(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="", version="", default_hp_metric=False)
    fit(tmp_path, Completions(every_n_iterations=2), module=StandIn(5), logger=logger)
    events = EventAccumulator(str(tmp_path), size_guidance={"histograms": 0}).Reload()
    table = events.Tensors("completions/text_summary")
    assert [event.step for event in table] == [1, 2, 4, 5]
    assert "&lt;answer&gt;0&lt;/answer&gt;" in table[0].tensor_proto.string_val[0].decode()
    names = ["reward/distribution", "completion/len_distribution", "policy/advantage_distribution"]
    assert events.Tags()["histograms"] == names
    assert [event.step for event in events.Histograms(names[0])] == [1, 2, 4, 5]


def test_samples_are_lines_of_json(tmp_path):
    fit(tmp_path, Completions(every_n_iterations=2), module=StandIn(3))
    names = [f"iteration-00000{n}.jsonl" for n in (1, 2, 3)]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == names
    lines = (tmp_path / "samples" / names[1]).read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [2] * 4


def test_the_first_iteration_prints_the_first_groups(tmp_path, capsys):
    fit(tmp_path, Completions(num_logged_groups=1), module=StandIn(3))
    lines = [line for line in capsys.readouterr().out.splitlines() if "rewards" in line]
    assert lines == ["group 0: rewards      1.00   0.00"]


def test_three_groups_are_printed_with_rewards_and_advantages():
    total = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    rewards = RewardTable({"a": total}, {"a": 1.0}, total, torch.ones_like(total, dtype=torch.bool))
    advantages = total - total.mean(1, keepdim=True)
    text = format_first_groups(rewards, advantages, Completions().num_logged_groups)
    assert text.splitlines() == [
        "group 0: rewards      1.00   0.00",
        "         advantages   0.50  -0.50",
        "group 1: rewards      0.50   0.50",
        "         advantages   0.00   0.00",
        "group 2: rewards      0.00   1.00",
        "         advantages  -0.50   0.50",
    ]


def test_an_interval_of_zero_disables_it(tmp_path, capsys):
    fit(tmp_path, Completions(every_n_iterations=0), module=StandIn(2))
    assert not (tmp_path / "samples").exists()
    assert "group 0" not in capsys.readouterr().out


def test_a_module_without_rollouts_writes_nothing(tmp_path):
    class Supervised(StandIn):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            return {"loss": torch.zeros(())}

    fit(tmp_path, Completions(1), module=Supervised(2))
    assert not (tmp_path / "samples").exists()


def test_a_row_of_an_episode_has_generated_turns_and_observations():
    one, other = rows_of_episodes()
    assert one["messages"] == SAID
    assert one["turn_rewards"] == [0.0, 1.0]
    assert one["calls"] == {"multiply": [1, 0]}
    assert (other["turn_rewards"], other["failed"], other["observation_tokens_cut"]) == (
        [None],
        "timed out",
        7,
    )


def test_a_row_of_a_single_turn_has_no_entries_of_episodes():
    rollout = rollout_of(prompts("A"))
    assert episode_row(rollout, 0) == {}
    shown = format_episode({"prompt": "A", "completion": "b\nc"})
    assert shown.splitlines() == ["prompt     | A", "policy     | b", "           | c"]


def test_an_episode_is_formatted_turn_by_turn():
    one, other = (format_episode(row).splitlines() for row in rows_of_episodes())
    assert one == [
        "prompt     | 2*3=?",
        "policy 1   | <call>2*3</call>   (reward 0)",
        "tool multiply | 6 | *six*",
        "policy 2   | 6   (reward 1)",
        "reward:      1  (correct 1, format none)",
        "advantage:   0.5",
        "calls:       multiply 1 (0 failed)",
    ]
    assert other[1].endswith("(reward none)")
    assert other[-2:] == ["failed:      timed out", "cut off:     7 observation tokens"]


def test_a_table_of_episodes_shows_every_message():
    shown = render_logged_table("episodes", episode_table(rows_of_episodes()))
    assert shown[0] == "| episode | role | text | turn reward | reward | advantage |"
    assert shown[2] == "| 0 | prompt | 2&#42;3=? |  | 1 | 0.5 |"
    assert shown[4] == "| 0 | tool multiply | 6 &#124; &#42;six&#42; |  |  |  |"
    assert shown[6].startswith("| 1 | prompt")
    assert len(shown) == 2 + 4 + 2
    assert completion_table(rows_of_episodes())[0][:2] == ["prompt", "completion"]
