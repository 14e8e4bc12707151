"""Unknown commands, options and recipes."""

from tests.misuse.probe import QUICK, Probe

PROBES = [
    Probe("no such command", "fitt", ("did you mean 'fit'",), quick=True),
    Probe("no such recipe", "fit -c nowhere.yaml", ("nowhere.yaml",)),
    Probe("wrong key", f"{QUICK} --model.group_sise 4", ("group_size",), quick=True),
    Probe("wrong type", f"{QUICK} --model.group_size four", ("group_size",)),
    Probe("negative group size", f"{QUICK} --model.group_size -2", ("group_size",)),
    Probe("group of one", f"{QUICK} --model.group_size 1", ("group_size",)),
    Probe("top_p beyond 1", f"{QUICK} --model.sampling.top_p 2", ("top_p",)),
    Probe("negative temperature", f"{QUICK} --model.sampling.temperature -1", ("temperature",)),
    Probe("no data file", f"{QUICK} --data.train nowhere.jsonl", ("nowhere.jsonl",)),
    Probe("empty data file", f"{QUICK} --data.train a.jsonl", ("a.jsonl",), files={"a.jsonl": ""}),
    Probe(
        "malformed line",
        f"{QUICK} --data.train a.jsonl",
        ("a.jsonl", "line 2"),
        files={"a.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n'},
    ),
    Probe("batch beyond the data", f"{QUICK} --data.batch_size 1000000", ("batch_size",)),
    Probe("no checkpoint", f"{QUICK} --ckpt_path last", ("last",)),
    Probe(
        "a sound command",
        QUICK,
        ("results are in",),
        code=0,
        after=lambda f: "" if (f / "run" / "summary.json").exists() else "no summary.json",
    ),
]
