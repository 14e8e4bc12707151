"""Find home-made words: `python -m tests.house.glossary [PATH ...]`.

Every docstring, comment and text of the code, and every line of a page, is compared with a list of
words that readers from TRL, verl and Lightning had to look up. Each entry names the usual term.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
# Files and folders that the list holds for.
PATHS = [
    *("src", "tests", "docs", "configs"),
    *("README.md", "CHANGELOG.md", "SECURITY.md", "AGENTS.md", "CONTRIBUTING.md", "cli.py"),
    *("examples", "notebooks", ".github"),
]
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".ipynb")
# A line that must use such a word for another reason ends with this.
ALLOWED = "glossary: ok"
# Lists of words of other people's answers, and this list.
WORD_LISTS = (Path(__file__), ROOT / "src/litgrpo/text/number_words.py")
# {pattern: what to write instead}
BANNED = {
    r"\banew\b": "again",
    r"\blikewise\b": "also, or nothing",
    r"\bas ever\b": "nothing",
    r"\b(?:hears?|heard|hearing)\b": "observation, receives",
    r"\b(?:goes|go|going|went) on\b": "resume, continue",
    r"\blets? (?:it|them|him) go\b|\blets? go\b": "release, shut down",
    r"\bso (?:many|much)\b": "at most N, this many",
    r"\bnobody\b|\bno one\b": "name the subject",
    r"\bat hand\b": "in memory, available",
    r"\bcareless\b": "noisy",
    r"\bwhat of\b": "which part of",
    r"\b(?:tells?|told|telling)\b": "prints, logs, passes",
    r"\b(?:spoken|speaks?|speaking)\b": "generates, generated",
    r"\bby (?:itself|themselves|himself)\b": "automatically",
    r"\bof (?:its|their|your|our|his) own\b": "own, separate",
    r"\bstands? (?:in|on|for)\b": "is in, represents",
    r"\bis short\b|\bmemory is short\b": "out of memory",
    r"\brefus(?:e|es|ed|al|ing)\b": "raises, rejects",
    r"\bgold (?:answer|reply|one)s?\b": "reference answer",
    r"\boverlays?\b": "config override",
    r"\bverbs?\b": "command",
    r"\bcarriers?\b": "data class",
    r"\brooms?\b": "package",
    r"\bteach(?:es)?\b|\btaught\b": "has zero advantage, contributes to the loss",
    r"\bequal groups?\b": "zero-variance group",
    r"\bredraw\w*\b": "resample (dynamic sampling)",
    r"\bjournal\w*\b": "tool-response log",
    r"\b(?:start|starting) model\b|\bthe start's\b": "initial policy",
    r"\bmoments\b": "optimizer state",
    r"\btricks?\b|\bhacks?\b": "exploit",
    r"\bhazards?\b": "stop probability",
    r"\bpeers?\b": "TRL, baseline",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bforetell\w*\b|\bforetold\b": "predict",
    r"\bat most(?=[,;:)]|\.(?:\s|$)|\s*$)": "at most N",
    r"\b(?:right|wrong) (?:answer|completion|reply|row|one|sample)s?\b": "correct, incorrect",
    r"\bour(?:s|selves)?\b|\bby us\b": "litgrpo's, or nothing",
    r"\bsays so\b|\bsay so\b|\bsaid so\b": "name the message",
    r"\bone step off\b": "one-step off-policy",
    r"\bdivided (?:weights|models?|polic(?:y|ies)|parameters?)\b": "sharded",
    r"\bcircles?\b": "cycle",
    r"\bmany a\b|\bsuch an? one\b|\bwhoever\b|\bwhatever\b": "a plain noun",
    r"\bthe more so\b|\bbesides\b": "also, in addition to",
}
OPENING = re.compile(r"\s*(?:What|Whether|Who|Whose|Of|As|How|That|Where|When)\b")
PARTICIPLE = re.compile(r"_?[a-z]+(?<!e)ed(?:_|$)")
VERBS_IN_ED = {"need", "feed", "seed", "embed", "speed", "shed", "breed", "exceed", "proceed"}
_PATTERNS = [(re.compile(pattern, re.IGNORECASE), use) for pattern, use in BANNED.items()]


class Hit(NamedTuple):
    """A home-made word.

    Example:
        >>> str(Hit("src/a.py", 3, "anew", "again"))
        "src/a.py:3: 'anew' -> again"
    """

    path: str
    line: int
    found: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r} -> {self.use}"


def hits(path: Path) -> Iterator[Hit]:
    """Yield home-made words of a file, in order."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    lines = text.splitlines()
    found = {*(_of_python(text) if path.suffix == ".py" else _of_page(lines))}
    for line, word, use in sorted(found):
        if ALLOWED not in lines[line - 1]:
            yield Hit(name, line, word, use)


def _of_page(lines: list[str]) -> Iterator[tuple[int, str, str]]:
    for number, line in enumerate(lines, start=1):
        # Names and addresses are not prose.
        yield from _banned(number, re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>", "``", line))


def _of_python(text: str) -> Iterator[tuple[int, str, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kinds = (tokenize.STRING, tokenize.COMMENT)
        if token.type in kinds or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for offset, line in enumerate(token.string.splitlines()):
                yield from _banned(token.start[0] + offset, re.sub(r"`[^`]*`", "``", line))
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring and (opening := OPENING.match(docstring)):
                yield node.body[0].lineno, opening[0].strip(), "an imperative verb or a noun first"
        if isinstance(node, ast.FunctionDef) and not node.decorator_list:
            first = re.match(r"_*([a-z]+)", node.name)
            if first and PARTICIPLE.match(first[1] + "_") and first[1] not in VERBS_IN_ED:
                yield node.lineno, f"def {node.name}", "a verb: functions are verbs"


def _banned(number: int, line: str) -> Iterator[tuple[int, str, str]]:
    for pattern, use in _PATTERNS:
        for match in pattern.finditer(line):
            yield number, match[0], use


def files(paths: list[str]) -> list[Path]:
    """Files of `SUFFIXES` below these paths."""
    found: list[Path] = []
    for path in paths:
        place = ROOT / path
        inside = [place] if place.is_file() else sorted(place.rglob("*"))
        found += [file for file in inside if file.suffix in SUFFIXES]
    return [file for file in found if "_made" not in file.parts and file not in WORD_LISTS]


def main() -> None:
    """Print every home-made word of the given paths, or of the whole repository."""
    paths = sys.argv[1:] or PATHS
    found = [hit for file in files(paths) for hit in hits(file)]
    for hit in found:
        print(hit)
    print(f"{len(found)} home-made words")


if __name__ == "__main__":
    main()
