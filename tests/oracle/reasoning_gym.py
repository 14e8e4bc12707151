"""Find the tasks of reasoning-gym that execute the answer which they score.

`python -m tests.oracle.reasoning_gym` prints the table of `rewards/builtin/reasoning_gym.py`. Each
task scores answers that are code to create a folder. If the folder exists afterwards, the task has
executed its answer. The code does nothing else.
"""

import os
import signal
import tempfile
from importlib.metadata import version

from litgrpo.rewards.builtin.reasoning_gym import EVALUATED


def answers_with_code(reference: str | None, code: str) -> list[str]:
    """Return answers that contain code, alone and in the formats of reference answers."""
    return [code, f"{reference}\n{code}", f"[{code}]", f'{{"a": {code}}}', f"{reference} + {code}"]


def is_executed(task: str, folder: str) -> bool:
    """Return True if a task executes one of the answers."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset(task, size=1, seed=1)[0]
    score = reasoning_gym.get_score_answer_fn(task)
    marker = os.path.join(folder, task)
    for text in answers_with_code(entry["answer"], f"__import__('os').mkdir({marker!r})"):
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
    """Print the tasks that execute answers, and how the table differs."""
    from reasoning_gym.factory import DATASETS

    with tempfile.TemporaryDirectory() as folder:
        found = {
            task for task in sorted(DATASETS) if task != "composite" if is_executed(task, folder)
        }
    print(f"reasoning-gym {version('reasoning-gym')}: {len(DATASETS)} tasks; executed:")
    print("\n".join(sorted(found)))
    other = found ^ (set(EVALUATED) - {"composite"})  # "composite" consists of the others
    print(f"in one list but not in the other: {', '.join(sorted(other)) or 'none'}")


if __name__ == "__main__":
    main()
