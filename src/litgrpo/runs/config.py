"""The resolved config of a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from litgrpo.evaluation.evaluator import format_success_rule
from litgrpo.files import read_text
from litgrpo.rewards.reward import find_success_rewards
from litgrpo.text.program import program_name
from litgrpo.text.secrets import mask_settings
from litgrpo.text.yaml_limits import check_limits


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a value is a number, and no integer that is too large for a float."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float)


@dataclass(frozen=True)
class RunConfig:
    """Resolved config of a run, with defaults.

    Args:
        values: content of `config.yaml`; empty if there is none.
        path: path of that file, for commands; "" if there is none.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, which may leave out `init_args`.

        None counts as missing.
        """
        node: Any = self.values
        for word in key.split("."):
            inside = node.get("init_args") if isinstance(node, Mapping) else None
            for mapping in (node, inside):
                if isinstance(mapping, Mapping) and word in mapping:
                    node = mapping[word]
                    break
            else:
                return default
        return default if node is None else node

    def number(self, key: str, default: float) -> float:
        """Return the number of a key; the default if it is missing or not a number."""
        value = self.get(key, default)
        return float(value) if is_number(value) else default

    @property
    def rewards(self) -> Mapping[str, Any]:
        """{name: settings} of the reward functions."""
        rewards = self.get("model.rewards")
        return rewards if isinstance(rewards, Mapping) else {}

    @property
    def success_rewards(self) -> dict[str, str]:
        """{task: the reward that decides whether a completion is correct}, "" for all others.

        Empty if it is not known.
        """
        success_reward = self.get("model.evaluation.success_reward")
        success_reward = str(success_reward) if success_reward else None
        weights = {n: self.get(f"model.rewards.{n}.weight", 1.0) for n in self.rewards}
        tasks = {n: self.get(f"model.rewards.{n}.tasks", []) for n in self.rewards}
        tasks = {n: list(map(str, t)) if isinstance(t, list) else [] for n, t in tasks.items()}
        numbers = {n: float(w) for n, w in weights.items() if is_number(w)}
        deciding = find_success_rewards(numbers, tasks, success_reward)
        return deciding if deciding[""] else {}

    @property
    def success_rule(self) -> str:
        """Rule by which a completion is correct, in words; "" if it is not known."""
        deciding = self.success_rewards
        threshold = self.number("model.evaluation.success_threshold", 1.0)
        return format_success_rule(deciding, threshold) if deciding else ""

    def fix_command(self, setting: str, value: str) -> str:
        """Return the command that trains again with one setting changed, or audits the rewards.

        Returns:
            "" if there is no config, or nothing to set.
        """
        if not self.path:
            return ""
        if value:
            folder = str(self.path).rpartition("/")[0] or "."
            args = ["-c", self.path, "--run_dir", f"{folder}-changed", f"--{setting}", value]
            return f"{program_name()} fit {shlex.join(args)}"
        if setting.startswith("model.rewards"):
            return f"{program_name()} audit -c {shlex.quote(self.path)}"
        return ""


def read_config(file: Path) -> RunConfig:
    """Read the config of a run, with secrets masked; an empty one if the file does not exist.

    Raises:
        ValueError: the file is not YAML.
    """
    values = read_yaml(file)
    return RunConfig(mask_settings(values), str(file)) if values else RunConfig()


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file with a mapping; {} if there is no file or it holds anything else.

    Raises:
        ValueError: the file is not YAML.
    """
    text = read_text(path)
    try:
        check_limits(text)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as of a date
        message = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not valid YAML: {message}; fix it or move it out of the run folder"
        ) from error
    return content if isinstance(content, dict) else {}
