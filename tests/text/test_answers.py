from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from litgrpo.text.answers import (
    answer_claims,
    extract_answer,
    extract_reasoning,
    find_boxed,
    find_nouns,
    find_tagged,
    parse_number,
    reasonings,
    same_text,
    text_of,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<reasoning>1 + 1</reasoning><answer>2</answer>", "2"),
        ("<answer>1</answer> no: <answer> 2 </answer>", "2"),
        ("<answer>2</answer> and then <answer>3", "2"),
        ("48 + 24 = 72\n#### 72\n", "72"),
        (r"so $\boxed{\frac{3}{4}}$.", r"\frac{3}{4}"),
        (r"<answer>\boxed{7}</answer>", "7"),
        ("<answer>#### 7</answer>", "7"),
        ("#### 1 <answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("2", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_is_found(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_every_claim_is_listed() -> None:
    assert answer_claims("<answer>1</answer><answer>2</answer>") == ["1", "2"]
    assert find_tagged("<a>1</a><a>2<a>3</a>", "a") == ["1", "3"]
    assert find_boxed(r"\boxed{1} \boxed{{2}} } \boxed{3") == ["1", "{2}"]


def test_reasoning_is_what_the_tag_holds_or_what_precedes_the_answer() -> None:
    assert extract_reasoning("<reasoning> a </reasoning><answer>b</answer>") == "a"
    assert extract_reasoning("a <answer>b</answer>") == "a"
    assert extract_reasoning("a") == "a"
    messages = [{"role": "assistant", "content": "<think>b</think>"}]
    assert reasonings(["<think>a</think>", messages], "think") == ["a", "b"]


def test_chat_messages_are_read_like_text() -> None:
    assert text_of([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]) == "b"


SEVENTY_TWO = [
    "72", " 72\n", "+72", "72.", "72.00", "072", "$72", "$72.00", r"\$72", "72$", "US$72", "Rs.72",
    "\u20ac72", "72%", r"72\%", "72 %", "72 clips", "72 km/h", "72 m^2", "72 m2", "72cm",
    "72\u00b0", r"72^\circ", "It is 72!", "The answer is 72.", "x = 72", "=72", "**72**",
    "(72)", "`72`",
    "144/2", "144 / 2", "72/1", r"\frac{144}{2}", r"\dfrac{144}{2}", r"$\frac{144}{2}$",
    r"\boxed{72}", r"$\boxed{72}$", r"\(72\)", r"\text{72}", r"72\text{ clips}",
    r"72 \text{ clips}", r"\mathbf{72}", r"\left(72\right)", "7.2e1", "7.2E+01",
    r"7.2 \times 10^{1}", "7.2 x 10^1", "7.2\u00d710^1", "72\u00a0clips", "#### 72",
]  # fmt: skip


@pytest.mark.parametrize("text", SEVENTY_TWO)
def test_all_renderings_of_72_are_72(text: str) -> None:
    assert parse_number(text) == 72


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,080", 1080), ("1 080", 1080), ("1\u202f080", 1080), (r"1\,080", 1080), ("1{,}080",
        1080), ("$1,234,567.50", Fraction(2469135, 2)), ("-5", -5), ("\u22125", -5), ("\u20135",
        -5), ("- 5", -5), ("-$5", -5), ("$-5", -5), ("minus 5", -5), ("negative 5", -5),
        ("the change is -5.", -5), ("(-5)", -5), (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-3}{4}", Fraction(-3, 4)), (r"\frac34", Fraction(3, 4)), ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)), ("\u00be", Fraction(3, 4)), ("3\u20444", Fraction(3, 4)),
        ("1 3/4", Fraction(7, 4)), ("-1 3/4", Fraction(-7, 4)), (r"1\frac{3}{4}", Fraction(7, 4)),
        ("2\u00bd", Fraction(5, 2)), (".5", Fraction(1, 2)), ("-.5", Fraction(-1, 2)), ("$.50",
        Fraction(1, 2)), ("0.1", Fraction(1, 10)), ("1e-3", Fraction(1, 1000)), ("0", 0), ("1/3",
        Fraction(1, 3)),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly(text: str, number: Fraction) -> None:
    assert parse_number(text) == number


def test_every_exponent_is_read_in_every_spelling() -> None:
    superscripts = str.maketrans(
        "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
    )
    for mantissa in ("1", "2.5", "-4", "0.25", "1,500"):
        for n in range(-12, 25):
            number = Fraction(mantissa.replace(",", "")) * Fraction(10) ** n
            raised = str(n).translate(superscripts)
            for text in (
                *(f"{mantissa}e{n}", f"{mantissa}E{n:+d}", f"about {mantissa}e{n} meters"),
                *(f"{mantissa}e{n} m2", f"{mantissa} x 10^{n}", f"{mantissa}*10**{n}"),
                *(rf"{mantissa} \times 10^{{{n}}}", rf"$\boxed{{{mantissa}\cdot 10^{{{n}}}}}$"),
                *(f"{mantissa} \u00d7 10{raised}", f"{mantissa}\u00b710{raised} km"),
            ):
                assert parse_number(text) == number, text
            if mantissa == "1":
                assert parse_number(f"10^{{{n}}}") == number
                assert parse_number(f"10{raised} m") == number


@pytest.mark.parametrize(
    "text",
    [
        "x > 5", "< 5", ">= 5", "\u2265 5", r"x \leq 5", "5 < x", "5 > x", "x \u2260 5",
        "at least 5", "more than 5", "at most $5", "5i", "5x", "5 x", "5n", "5!", "5!!",
        "5\u03c0", "5\u221a2", "5\u00b2", "10^x", "x^10", "110^2", "1.10^2", "10^3.5",
        "3 + 10^2", "10^2^3", "1e1000",
    ],
)  # fmt: skip
def test_bounds_products_and_powers_are_not_their_number(text: str) -> None:
    assert parse_number(text) is None


# A word or sign beside a number that makes it another one, or no statement of it.
OTHER_CLAIMS = (
    """
twice 5|half of 5|5 or more|5k|5 or 6|not 5|5 hundred|5 dozen|5 thousand|5 million|5 of 10|5+
triple 5|double 5|5 squared|5 cubed|the square root of 5|5 or less|5 or so|up to 5|less than 5
over 5|nearly 5|almost 5|5ish|5-ish|5 plus|5 plus two|5 minus one|one less than 5
one more than 5|5M|5K|5B|5bn|5 grand|5 trillion|5 gross|5 score|5 tenths|5 hundredths|5 halves
a 5th|one 5th|5 times the price|5 times that|5 and a half|5 apples and a half|5 apples or more
5 apples less than Bob|the reciprocal of 5|the negative of 5|the opposite of 5|5 factorial
5 mod two|log 5|sin(5)|5 to one|5 in ten|5 out of ten|5 over two|5 divided by two|ten times 5
a multiple of 5|divisible by 5|before 5|within 5|isn't 5|it is not 5|it can't be 5|never 5
anything but 5|all but 5|approximately half of 5|5 fold|5-fold|fivefold 5|5 short of ten
5 too many|5 point five|zero point 5|twenty 5|some 5 odd|5 = x|5^|5\u2030|\u22485x|5\u2460|5a
#5b|v5|5 G|5 k|5, or more|5 maybe more|5 less|Twice 5|5 Or More|5 DOZEN|**twice** 5
half of the 5|two thirds of about 5|\u221b5|\u00b15|5\u00b11|5@|5 percent or more
!=5|x != 5|=/=5|x^2 = 5|-x = 5|log x = 5|sqrt(x) = 5|x mod 7 = 5|double = 5|half: 5|twice that is 5
five hundred: 5|minus: 5|(-)5|\u20145|the wrong number is 5|I doubt it is 5|5 is wrong|5 is too low
5 is half|5 is less than it|5 - no|5? no|5. Wait, six|5 in total or six|5 instead of six|5C2|5 log
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize("text", OTHER_CLAIMS)
def test_a_number_beside_any_unlisted_word_is_no_answer(text: str) -> None:
    assert parse_number(text) is None


STATEMENTS = (
    """
about 5|5%|~5|$5|5 km per hour|the answer is 5 dollars.|5 times|5 more|Final answer: **5**
5 dollars per hour|US$5|5 USD|5\u20ac|EUR 5|5/day|5 mph|5 square feet|5 cubic meters|5 ft tall
She has 5 left.|5 apples left|So the total is 5.|the total cost is $5|It costs 5 cents
5 feet long|5 pounds of flour|5 hours a day|5 additional students|5, because that is it
5. That is it|"5"|[5]|B. 5|**5** apples|5 \u00b0C|5 degrees Celsius|There are 5 students
It takes 5 days to finish|the sum is 5|5 is the answer|5 in total|a total of 5
Janet makes $5 every day|exactly 5|5 pairs of socks|5 L|She needs $5 more to buy the wallet
5 years older than Ann|Natalia sold 5 clips altogether in the months of April and May.
""".strip()
    .replace("\n", "|")
    .split("|")
)


@pytest.mark.parametrize("text", STATEMENTS)
def test_the_words_of_an_answer_may_stand_beside_its_number(text: str) -> None:
    assert parse_number(text) == 5


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Wie viele \u00c4pfel hat Anna?", "5 \u00c4pfel"),
        ("Combien de be\u0301be\u0301s?", "5 b\u00e9b\u00e9s"),
        (
            "\u0421\u043a\u043e\u043b\u044c\u043a\u043e \u044f\u0431\u043b\u043e\u043a?",
            "5 \u044f\u0431\u043b\u043e\u043a",
        ),
        ("?", "5 \U0001f34e"),
        ("?", "\U0001f449 5"),
        ("?", "Total cost (in dollars) = 5"),
        ("?", "5 is the answer"),
        ("?", "5 feet^2"),
    ],
)
def test_words_of_all_scripts_pictures_and_names_may_stand_beside_a_number(prompt, text) -> None:
    assert parse_number(text, find_nouns(prompt)) == 5


def test_what_a_prompt_asks_for_may_follow_the_number_but_no_number_word() -> None:
    nouns = find_nouns([{"role": "user", "content": "How many wombats, twice a dozen or more?"}])
    assert parse_number("5 wombats", nouns) == parse_number("5 wombat", nouns) == 5
    for text in ("5 dozen", "5 or", "5 or more", "twice 5", "wombats 5", "5 wombats or more"):
        assert parse_number(text, nouns) is None
    assert parse_number("5 wombats") is None
    assert find_nouns(None) == frozenset({"none"})


@pytest.mark.parametrize(
    "text",
    [
        "-> 5", "=> 5", "--> 5", "<b>5</b>", "5 apples", "5m", "5 km", "5in", "5 a day", "5 a.m.",
        "5 yards", "5 more", "\u2248 5", "5th", "5 years", "x = 5",
    ],
)  # fmt: skip
def test_units_arrows_and_words_beside_a_number_are_looked_over(text: str) -> None:
    assert parse_number(text) == 5


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("x = -72", -72), ("answer - 72", -72), ("a -72 degree wind", -72), ("72/h", 72),
        ("72 m/s", 72), ("72 - I think", 72), ("72 - a nice number", 72), ("Answer:\n* 72", 72),
        ("answer: **72**", 72), ("B) 72", 72),
    ],
)  # fmt: skip
def test_letters_beside_a_number_are_not_always_variables(text: str, number: int) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("(3, 4)", "(3,4)", True),
        ("[0,1)", "[0, 1)", True),
        ("x^2 + 1", "x^2+1", True),
        ("{1 , 2}", "{ 1,2 }", True),
        ("New  York", "new york", True),
        ("ice cream", "icecream", False),
        ("(3, 4)", "(3, 5)", False),
    ],
)
def test_spaces_beside_signs_do_not_matter(left: str, right: str, same: bool) -> None:
    assert same_text(left, right) is same


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "no idea", "seventy-two", "72 or 73", "71, 72, 73", "72 73", "72 = 72", "1.2.3",
        "1.080.000", "10,00", "3/4/5", "3:30", "70-72", "x-72", "x+72", "x/72", "--5", "72^2",
        "2^6", "3*24", "\u221a72", r"\sqrt{72}", r"\pi 72", r"72\pm1", "sqrt(72)", "72 squared",
        "not 72", "1/0", "71 2/2", "9" * 101, r"\frac{x}{2}",
        "x + 72", "x^2 + 72", "x\u00b2 + 72", "n - 72", "y * 72", "x / 72", "x -72", "(x) + 72",
        "72 + x", "72 - n", "72 * k", "72/x", "2 + i", "total + 72", "$x + 72$", r"\(x + 72\)",
    ],
)  # fmt: skip
def test_what_is_not_one_number_is_none(text: str) -> None:
    assert parse_number(text) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "piece",
    [
        "9", "1,", "1,080,", " ", "1 ", "-", "$", "(", "{", "}", "\\", r"\frac{", r"\frac ",
        r"\frac{1}{2}", r"\boxed{", "<answer>", "</answer>", "<answer>9", "#### ", "####\n", ".",
        "1.", "e", "1e", "10^", "* 10 ^", "x", "m2", "a ", "\n",
        "<", "<b", "<b>", "=>", "\u00b2", "\u207b", "(1 , 2) ", "than ", "x10**1", "000,", "5x",
    ],
)  # fmt: skip
def test_a_long_repetition_of_anything_is_read_in_linear_time(piece: str) -> None:
    # This takes a fraction of a second. A quadratic step would take minutes.
    text = piece * (200_000 // len(piece))
    hostile = f"-1{text}1"
    extract_answer(hostile)
    extract_reasoning(hostile)
    parse_number(hostile)
    same_text(hostile, hostile[:-1])


EXPONENTS = ["e{}", "E{}", " x 10^{}", " * 10^{}", r" \times 10^{{{}}}"]
SURROUNDINGS = ["{}", "{} cups", "about {} per week", "**{}**", "{}%", "{}."]


@given(
    st.sampled_from(["", "-", "\u2212"]),
    st.integers(0, 10**7),
    st.none() | st.from_regex("[0-9]{1,4}", fullmatch=True),
    st.none() | st.integers(-9, 9),
    st.sampled_from(EXPONENTS),
    st.sampled_from(SURROUNDINGS),
    st.booleans(),
)
@example("", 25, "0", 2, "e{}", "{}", False)
@example("", 1, None, 3, "e{}", "{} cups", False)
def test_a_number_in_any_notation_is_read_exactly(
    sign, whole, decimals, exponent, notation, surroundings, separators
):
    mantissa = f"{whole:,}" if separators else str(whole)
    value = Fraction(whole)
    if decimals is not None:
        mantissa += f".{decimals}"
        value += Fraction(int(decimals), 10 ** len(decimals))
    text = f"{sign}{mantissa}"
    if exponent is not None:
        text += notation.format(exponent)
        value *= Fraction(10) ** exponent
    found = parse_number(surroundings.format(text))
    assert found == (-value if sign else value)


@given(st.integers(-999, 999), st.integers(1, 99), st.sampled_from(["{}/{}", r"\frac{{{}}}{{{}}}"]))
def test_a_fraction_is_read_exactly(above, below, notation):
    assert parse_number(notation.format(above, below)) == Fraction(above, below)
