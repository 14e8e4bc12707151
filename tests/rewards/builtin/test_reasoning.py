import pytest

from litgrpo.rewards.builtin.reasoning import arithmetic, coherence, connectives, relevance, steps
from tests.support.raises import raises_for

QUESTIONS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How"
    " much did she earn?",
    "Tom has 47 apples and gets 38 more. How many apples does Tom have?",
]
WORKED = [
    "Natalia sold 48/2 = 24 clips in May. So she sold 48+24 = 72 clips altogether.",
    "Weng earns 12/60 = $0.2 per minute. Working 50 minutes, she earned 0.2 x 50 = $10.",
    "Tom starts with 47 apples.\nThen he gets 38 more, which gives 47+38=85 apples.",
]
EXPLOITS = {
    "empty": "",
    "no idea": "I have no idea.",
    "connectives": "so then therefore because thus hence first second next finally " * 5,
    "connectives, one a line": "So then thus.\nTherefore because.\nHence finally.\nFirst next.\n"
    * 3,
    "repeated": "Natalia sold 24 clips. " * 20,
    "digits": "1 2 3 4 5 6 7 8 9 " * 10,
    "noise": "xq zvk wpt\nqqq rrt zzz\nbbn mmk ooo\n",
}


def tag_reasoning(reasoning: str) -> str:
    return f"<reasoning>{reasoning}</reasoning><answer>7</answer>"


def judge(function, texts, questions=None, **kwargs):
    return function(
        questions or ["?"] * len(texts), [tag_reasoning(text) for text in texts], **kwargs
    )


def test_steps_by_hand() -> None:
    texts = ["", "word", "One step.", "A step. And more.", "A step. A step. Another step.",
             "1. Add them.\n2. Take half.\n- Say it."]  # fmt: skip
    # a word alone is no step; the repeated step costs a third of two different ones
    assert judge(steps, texts) == pytest.approx([0, 0, 0.5, 1, 2 / 3, 1])
    many = ". ".join(f"step number {n}" for n in range(18)) + "."
    assert judge(steps, [many], max_steps=12) == pytest.approx([0.5])
    assert judge(steps, [many * 2], max_steps=12)[0] < 0.5


def test_connectives_by_hand() -> None:
    texts = [
        "Tom has 47 apples. He gets 38 more. So he has 85.",  # the last of two is tied
        "Tom has 47 apples. 47 and 38 make 85. The answer says 85.",  # both by a number
        "Tom has apples. He is happy. They are red.",
        "Only one step.",
    ]
    assert judge(connectives, texts) == [0.5, 1.0, 0.0, 0.0]
    more = [f"{word} it rains today here" for word in ("One", "so", "so", "so", "so", "so")]
    assert judge(connectives, [". ".join(more) + "."]) == [1.0]  # two different sentences
    different = ". ".join(f"So {word} rains today here" for word in "abcdef")
    assert judge(connectives, [different + "."]) == [3 / 5]  # "so" counts three times


def test_arithmetic_by_hand() -> None:
    right = ["48/2 = 24", "<<48/2=24>>24", "0.2 x 50 = $10", "1,000 * 3 = 3,000", "20% * 50 = 10",
             "2 + 3 * 4 = 14", "10 - 2 - 3 = 5", "10 / 3 = 3.33", "-3 + 5 = 2", "120*.6=72",
             "$240 + $80 = $320"]  # fmt: skip
    wrong = ["48/2 = 25", "2 + 3 * 4 = 20", "10 / 3 = 3.34", "5 / 0 = 0", "10 / 3 = 3"]
    nothing = ["", "24", "1 + 0 = 1", "x + 2 = 3", "60 students x 2/3 = 40", "1+1=1", "a=b"]
    assert judge(arithmetic, right) == [1.0] * len(right)
    assert judge(arithmetic, wrong) == [0.0] * len(wrong)
    assert judge(arithmetic, nothing) == [0.0] * len(nothing)
    assert judge(arithmetic, ["2+2=4 and 3+3=7", "2+2=4 " * 9 + "3+3=7"]) == [0.5, 0.5]


def test_relevance_prefers_the_reasoning_of_its_own_question() -> None:
    own = judge(relevance, WORKED, QUESTIONS)
    swapped = judge(relevance, WORKED[1:] + WORKED[:1], QUESTIONS)
    assert min(own) > 0.8
    assert max(swapped) < 0.2
    assert judge(relevance, [""] * 3, QUESTIONS) == [0.0] * 3


def test_copies_and_lists_of_the_questions_words_are_not_relevant() -> None:
    copies = judge(relevance, QUESTIONS, QUESTIONS)
    lists = [" ".join(sorted(set(question.lower().split()))) for question in QUESTIONS]
    assert copies == [0.0] * 3
    assert max(judge(relevance, lists, QUESTIONS)) == 0.0


def test_frequent_words_alone_are_not_relevant() -> None:
    question = "How many of the apples are in her box?"
    assert judge(relevance, ["There are many of her own in the blue one."], [question]) == [0]
    assert judge(relevance, ["She puts six apples there."], [question])[0] > 0


def test_the_wording_of_the_task_counts_next_to_nothing() -> None:
    task = "Think carefully about arithmetic, please reason within tags."
    questions = [f"{question} {task}" for question in QUESTIONS]
    about_the_task = ["I think carefully about arithmetic and reason within the tags given."] * 3
    assert max(judge(relevance, about_the_task, questions)) < 0.4
    assert min(judge(relevance, WORKED, questions)) > 0.8


def test_chat_messages_are_read() -> None:
    prompts = [[{"role": "user", "content": question}] for question in QUESTIONS]
    replies = [[{"role": "assistant", "content": tag_reasoning(text)}] for text in WORKED]
    assert relevance(prompts, replies) == judge(relevance, WORKED, QUESTIONS)


@pytest.mark.parametrize("exploit", EXPLOITS)
def test_no_hack_is_as_coherent_as_honest_reasoning(exploit: str) -> None:
    honest = judge(coherence, WORKED, QUESTIONS)
    assert min(honest) > 0.7
    assert max(judge(coherence, [EXPLOITS[exploit]] * 3, QUESTIONS)) < 0.25


def test_impossible_settings_are_refused() -> None:
    with raises_for("min_steps", "max_steps"):
        judge(steps, ["a"], min_steps=3, max_steps=2)
