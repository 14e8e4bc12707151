"""Sources, columns, stop strings and the audit, used wrongly."""

from tests.misuse.probe import QUICK, Probe

ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
FILES = {"a.jsonl": ROWS, "b.jsonl": ROWS.replace("=", " =")}

PROBES = [
    Probe("a list of files", f"{QUICK} --data.train '[a.jsonl, b.jsonl]'", ("train 4",), 0, FILES),
    Probe(
        "files and texts in one list",
        f"{QUICK} --data.train '[a.jsonl, \"Explain this.\"]'",
        ("the list contains files and 'Explain this.'",),
        files=FILES,
        quick=True,
    ),
    Probe("a pattern without files", f"{QUICK} --data.train 'no/*.jsonl'", ("no file fits",)),
    Probe(
        "weights for some",
        f"{QUICK} --data.train '[{{path: a.jsonl, weight: 2}}, {{path: b.jsonl}}]'",
        ("1 of 2 sources have a weight",),
        files=FILES,
    ),
    Probe(
        "a weight of nothing",
        f"{QUICK} --data.train '[{{path: a.jsonl, weight: 0}}]'",
        ("weight",),
        files=FILES,
    ),
    Probe(
        "sets with names for training",
        f"{QUICK} --data.train '{{easy: a.jsonl}}'",
        ("train",),
        files=FILES,
    ),
    Probe(
        "a misspelled key of a validation source",
        f"{QUICK} --data.val '{{path: a.jsonl, limt: 3}}'",
        ("no key 'limt'", "did you mean 'limit'"),
        files=FILES,
    ),
    Probe(
        "a column that only a reward needs is missing",
        f'{QUICK} --data.train \'["1+1=", "2+2="]\'',
        ("reward 'correct' needs answer",),
        never=("Traceback (most recent call last)", "Invariants"),
        quick=True,
    ),
    Probe(
        "rows that stay on disk",
        f"{QUICK} --data.train b.jsonl --data.train.streaming true",
        ("train 2",),
        0,
        FILES,
    ),
    Probe(
        "streaming of a format that is read as a whole",
        f"{QUICK} --data.train a.csv --data.train.streaming true",
        ("a.csv cannot be read row by row", ".jsonl"),
        files={"a.csv": "prompt,answer\n1,2\n"},
    ),
    Probe(
        "streaming of a validation source",
        f"{QUICK} --data.val '{{path: a.jsonl, streaming: true}}'",
        ("a.jsonl: `streaming: true`",),
        files=FILES,
    ),
    Probe(
        "a repetition penalty",
        f"{QUICK} --model.sampling.repetition_penalty 1.2",
        ("model.sampling.repetition_penalty", "litgrpo.rewards.repetition"),
    ),
    Probe("an empty stop string", f"{QUICK} --model.sampling.stop ''", ("stop",)),
    Probe(
        "a stop token beyond the vocabulary",
        f"{QUICK} --model.sampling.stop_token_ids '[1000000]'",
        ("stop_token_ids has 1000000",),
    ),
    Probe("audit without a value", "audit -c {recipe} --model.rewards", ("needs a value",)),
]
