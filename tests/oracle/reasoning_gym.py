"""Which tasks of reasoning-gym execute the answer that they score: tried, task by task.

`python -m tests.oracle.reasoning_gym` prints the table of `rewards/builtin/reasoning_gym.py`. Each
task scores answers that would make a folder; what makes it is executed. It runs what it finds: the
answers do nothing but make that folder.
"""

import os
import signal
import tempfile
from importlib.metadata import version

from litgrpo.rewards.builtin.reasoning_gym import EXECUTED


def attempts(gold: str | None, code: str) -> list[str]:
    """Answers that hold code, alone and where a right answer would stand."""
    return [code, f"{gold}\n{code}", f"[{code}]", f'{{"a": {code}}}', f"{gold} + {code}"]


def is_executed(task: str, folder: str) -> bool:
    """Whether a task executes one of the attempts."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
    score = reasoning_gym.get_score_answer_fn(task)
    marker = os.path.join(folder, task)
    for text in attempts(entry["answer"], f"__import__('os').mkdir({marker!r})"):
        signal.alarm(20)
        try:
            score(text, entry)
        except Exception as error:
            print(f"  {task} raises {type(error).__name__}")
        signal.alarm(0)
        if os.path.isdir(marker):
            return True
    return False


def main() -> None:
    """Print the tasks that execute, and what the table has otherwise."""
    from reasoning_gym.factory import DATASETS

    with tempfile.TemporaryDirectory() as folder:
        found = {
            task for task in sorted(DATASETS) if task != "composite" if is_executed(task, folder)
        }
    print(f"reasoning-gym {version('reasoning-gym')}: {len(DATASETS)} tasks; executed:")
    print("\n".join(sorted(found)))
    other = found ^ (set(EXECUTED) - {"composite"})  # which is made of the others
    print(f"the table has otherwise: {', '.join(sorted(other)) or 'nothing'}")


if __name__ == "__main__":
    main()
