"""Sentences about invented people, to convert to JSON with name, age, job and city.

The training, validation and test sets share no name, job, city or sentence pattern.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

Row = dict[str, str]


@dataclass(frozen=True)
class Vocabulary:
    """Sentence patterns and words of one set; words are separated by `;`."""

    patterns: tuple[str, ...]  # sentences with placeholders; `{a_job}` is the job with its article
    first: str
    last: str
    jobs: str
    cities: str

    def rows(self, count: int) -> list[Row]:
        """Generate `count` rows, the same in every run, with the patterns in turn."""
        draw = random.Random(0)
        first, last = split_words(self.first), split_words(self.last)
        jobs, cities = split_words(self.jobs), split_words(self.cities)
        rows = []
        for number in range(count):
            job = draw.choice(jobs)
            answer = {
                "name": f"{draw.choice(first)} {draw.choice(last)}",
                "age": draw.randint(19, 79),
                "job": job,
                "city": draw.choice(cities),
            }
            a_job = f"{'an' if job[0] in 'aeiou' else 'a'} {job}"
            sentence = self.patterns[number % len(self.patterns)].format(a_job=a_job, **answer)
            rows.append({"prompt": sentence, "answer": json.dumps(answer)})
        return rows


TRAIN = Vocabulary(
    patterns=(
        "{name} is {age} years old and works as {a_job} in {city}.",
        "{city}: {name}, {job}, aged {age}.",
        "At {age}, {name} is {a_job} in {city}.",
        "The {job} {name} ({age}) lives in {city}.",
        "{name}, {age}, {a_job}, lives in {city}.",
        "Our {job} in {city} is {name}, who is {age}.",
        "{name} from {city} turned {age} last week and is still {a_job}.",
        "Meet {name}, {a_job} of {age} years from {city}.",
    ),
    first="""
        Anna; Ben; Carla; David; Elena; Frank; Grace; Hugo; Irene; Jonas; Karin; Leo; Maria; Nils;
        Olga; Peter; Rosa; Simon; Teresa; Victor; Wanda; Yusuf; Zoe; Amir; Bella; Chen
    """,
    last="""
        Adler; Brown; Costa; Dubois; Eriksen; Fischer; Garcia; Haddad; Ito; Jensen; Kowalski; Lopez;
        Meyer; Nguyen; Okafor; Petrov; Quinn; Rossi; Schmidt; Tanaka; Usman; Vega; Weber; Young
    """,
    jobs="""
        baker; nurse; teacher; plumber; lawyer; engineer; gardener; painter; driver; waiter;
        chemist; farmer; actor; judge; sailor; tailor; butcher; pilot; editor; librarian; barber
    """,
    cities="""
        Oslo; Lisbon; Prague; Vienna; Madrid; Rome; Paris; Athens; Dublin; Warsaw; Berlin; Hamburg;
        Boston; Chicago; Toronto; Lima; Bogota; Cairo; Nairobi; Delhi; Seoul; Osaka; Sydney; Perth
    """,
)
VALIDATION = Vocabulary(
    patterns=(
        "By trade {a_job}, {name} is {age} and lives in {city}.",
        "Born {age} years ago in {city}, {name} became {a_job}.",
    ),
    first="Daria; Emil; Flora; Gustav; Helga; Ivan; Julia; Kurt",
    last="Abbas; Berg; Castro; Duarte; Evans; Fontana; Gruber; Hansen",
    jobs="dancer; joiner; banker; hunter; optician; roofer; singer; welder",
    cities="Porto; Lyon; Turin; Bremen; Denver; Quito; Accra; Kyoto",
)
TEST = Vocabulary(
    patterns=(
        "In {city} lives {name}, {age} years old, {a_job}.",
        "{name} has been {a_job} in {city} for years and is now {age}.",
        "Aged {age}, {name} still works in {city} as {a_job}.",
        "I am {name}, {age}, from {city}, and I work as {a_job}.",
    ),
    first="""
        Agnes; Boris; Clara; Dora; Erik; Felix; Gina; Hanna; Igor; Jana; Kevin; Laura; Marco; Nora;
        Oscar; Paula; Robert; Sofia; Thomas; Ursula; Walter; Xenia
    """,
    last="""
        Allen; Becker; Conti; Diaz; Engel; Ferrari; Gomez; Hoffman; Ivanov; Johnson; Keller; Larsen;
        Moreau; Novak; Olsen; Park; Reyes; Silva; Turner; Virtanen; Wagner; Zhang
    """,
    jobs="""
        carpenter; dentist; surgeon; cook; mechanic; architect; translator; cleaner; shepherd;
        accountant; photographer; violinist; locksmith; miner; florist; astronomer; cashier; referee
    """,
    cities="""
        Geneva; Naples; Seville; Krakow; Munich; Bergen; Glasgow; Bordeaux; Montreal; Dallas;
        Havana; Santiago; Tunis; Lagos; Mumbai; Bangkok; Manila; Taipei; Auckland; Hanoi
    """,
)


def train() -> list[Row]:
    """Return 400 sentences to train on."""
    return TRAIN.rows(400)


def validation() -> list[Row]:
    """Return 100 sentences for choosing hyperparameters; no result is measured on them."""
    return VALIDATION.rows(100)


def test() -> list[Row]:
    """Return 300 sentences that results are measured on."""
    return TEST.rows(300)


def split_words(words: str) -> list[str]:
    """Split a text at `;` and normalize whitespace."""
    return [" ".join(word.split()) for word in words.split(";")]
