"""OpenReward server for tests: `openreward_server.py PORT`."""

import os
import sys

from openreward.environments import Environment, Server, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel


class Answer(BaseModel):
    answer: int
    name: str = ""


class Text(BaseModel):
    text: str


class Tasks(Environment):
    @classmethod
    def list_tasks(cls, split):
        return [{"n": n} for n in range(4)]

    @classmethod
    def list_splits(cls):
        return ["train"]

    def get_prompt(self):
        return [TextBlock(type="text", text=f"{self.task_spec['n']}+1?")]

    def result(self, right):
        text = TextBlock(type="text", text="right" if right else "wrong")
        return ToolOutput(blocks=[text], reward=float(right), finished=right)


class Sums(Tasks):
    @tool
    async def answer(self, params: Answer) -> ToolOutput:
        """Give the answer."""
        if params.answer < 0:
            os._exit(3)
        return self.result(params.answer == self.task_spec["n"] + 1)


class Talks(Tasks):
    @tool
    @terminal
    async def submit(self, params: Text) -> ToolOutput:
        """Mark a text."""
        return self.result(params.text == str(self.task_spec["n"] + 1))


Server([Sums, Talks]).run(port=int(sys.argv[1]))
