"""Sources, columns, stop strings and the audit, used wrongly."""

from tests.misuse.probe import QUICK, Probe

ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "2+2=", "answer": "4"}\n'
FILES = {"a.jsonl": ROWS, "b.jsonl": ROWS.replace("=", " =")}
ASKED = '{"messages": [{"role": "user", "content": "1+1="}], "answer": "2"}\n'
ANSWERED = ASKED.replace("}]", '}, {"role": "assistant", "content": "2"}]')

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
        "a weight of a task that is not there",
        f"{QUICK} --data.train '{{easy: a.jsonl}}' --data.task_weights '{{eazy: 1}}'",
        ("task_weights", "eazy", "easy"),
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
    Probe(
        "a chat row that ends with its answer",
        f"{QUICK} --data.train chat.jsonl --data.chat true --data.columns '{{prompt: messages}}'",
        ("chat.jsonl, line 1", "ends with a message of the assistant"),
        files={"chat.jsonl": ANSWERED + ASKED},
        quick=True,
    ),
    Probe(
        "a message without content",
        f"{QUICK} --data.train chat.jsonl --data.chat true --data.columns '{{prompt: messages}}'",
        ("chat.jsonl, line 2, message 1: has no content",),
        files={"chat.jsonl": ASKED + '{"messages": [{"role": "user"}], "answer": "2"}\n'},
    ),
    Probe(
        "a repeated key",
        f"{QUICK} --data.train a.jsonl",
        ("a.jsonl, line 3", "the key 'prompt' occurs twice"),
        files={"a.jsonl": ROWS + '{"prompt": "1", "prompt": "2", "answer": "3"}\n'},
    ),
    Probe(
        "a value that is not JSON",
        f"{QUICK} --data.train a.jsonl",
        ("a.jsonl, line 3", "NaN is not a JSON value"),
        files={"a.jsonl": ROWS + '{"prompt": "1", "answer": NaN}\n'},
    ),
    Probe(
        "deeply nested JSON",
        f"{QUICK} --data.train a.jsonl",
        ("a.jsonl, line 3", "nested more than 100 levels"),
        files={"a.jsonl": ROWS + '{"prompt": ' + "[" * 100_000 + "\n"},
    ),
    Probe(
        "UTF-16 without a byte order mark",
        f"{QUICK} --data.train a.txt",
        ("a.txt, line 1", "NUL", "UTF-8"),
        files={"a.txt": "1\0+\0001\0=\0\n\0"},
    ),
    Probe(
        "one prompt as a text",
        "predict --model.pretrained builtin:tiny-gemma2 --data.prompts 'What is 3+4?'"
        " --model.max_completion_length 8 --run_dir {folder}/run",
        ("What is 3+4?", "predictions.jsonl"),
        0,
    ),
    Probe("audit without a value", "audit -c {recipe} --model.rewards", ("needs a value",)),
]
