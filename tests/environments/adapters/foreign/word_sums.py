"""A taskset of the verifiers package: sums whose answer is searched in the last reply."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)


class WordSums(vf.Taskset[Sum]):
    def load(self):
        for n in range(5):
            data = SumData(prompt=f"q{n}?", answer=f"{n} and one", system_prompt="Count.")
            yield Sum(data, self.config.task)


__all__ = ["WordSums"]
