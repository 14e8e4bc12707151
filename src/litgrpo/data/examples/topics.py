"""Topics to write a sentence about; none of them suggests a cheerful one.

The training, validation and test sets share no topic.
"""

from __future__ import annotations

Row = dict[str, str]

TRAIN = """
a rainy Monday; my neighbour's dog; the bus to work; an old chair; the school canteen; a broken
cup; winter mornings; the sea; a long queue; my grandmother; a small village; the dentist; a
lost key; traffic; homework; an empty street; the night train; a cold soup; the first day at
work; a math exam; a spider; an argument; the news; a stone; the moon; a hospital; a wet coat;
the alarm clock; a forest; a bill; the kitchen; a bicycle; a cloud; the library; a shoe; an
onion; a river; the desert; a phone call; an old film; the wind; a ladder; a market; a garden;
the city; a bridge; a letter; the stairs; a storm; a clock; a hill; the post office; a window; a
mouse; snow; a farmer; the office; a wall; a ship; the road
"""
VALIDATION = (
    "a burnt toast; the last bus; a muddy field; my uncle; a grey sky; "
    "the waiting room; a heavy bag; "
    "a quiet house; the football match; a wooden spoon; a crowded beach; the printer; "
    "a lonely tree; a Sunday evening; the old cinema; a flat tyre; the mountain; a new job; "
    "the cellar; a paper boat"
)
TEST = """
a lamp; the carpet; a bucket; a fence; the harbour; a tunnel; a hammer; the ceiling; a drawer; a
pillow; the balcony; a tractor; a candle; the basement; a notebook; a crow; the elevator; a
receipt; a puddle; the pier; a nail; a kettle; an umbrella; the laundry; a pigeon; a torch; a
suitcase; the airport; a goat; a rope; the lighthouse; a pencil; an ant; the parking lot; a
stamp; the barber; a turnip; a broom; the fog; a swamp; a cardboard box; the dishes; a rusty
gate; a potato; a zebra crossing; the landlord; a screwdriver; a glacier; a snail; the town
hall; a cough; a mirror; the motorway; a plumber; an ashtray; a tax form; a passport; the dust;
a battery; a typewriter; the bank; an envelope; a donkey; a chimney; the attic; a saucepan; a
sock; a fork; a plate; the canal; a barrel; an anchor; a moth; the museum; a statue; the
factory; a warehouse; a lorry; a taxi; the tram; a helmet; a glove; a scarf; a belt; a button; a
zip; a needle; a thread; the tailor; a butcher; the baker; a cabbage; a carrot; garlic; a lemon;
a loaf of bread; a jar; a bottle; the fridge; the oven; a sink; a tap; a pipe; the plumbing; a
drain; a brick; a plank; a shed; a barn; a scarecrow; the plough; a cow; a hen; a sheep; a wolf;
a bat; an owl; a lizard; a frog; a beetle; a worm; a fly; a wasp; mud; clay; gravel; sand; ice;
hail; thunder; a drizzle; the frost; a drought; the tide; a cliff; a cave; a valley; a pond; the
marsh; a meadow; a branch; a root; a leaf; bark; moss; a mushroom; a thorn; the pavement; a
kerb; a signpost; the crossroads; a roundabout; a toll booth; a petrol station; an engine; a
wheel; a map; a compass; a tent; a backpack; a timetable; a ticket; a platform; a customs
officer; a clerk; a janitor; a guard; a judge; a soldier; a sailor; a miner; a nurse; a surgeon;
a pharmacist; a bandage; a headache; a fever; a tooth; an elbow; a knee; an ankle; a keyboard; a
cable; a socket; a plug; a screen; a password; an email; a meeting; a deadline; a spreadsheet; a
stapler; a folder; a contract; an invoice; rent; a mortgage; an insurance policy; a census; a
referendum; a budget; a stock exchange; a treaty; a border; a flag; a monument; a cemetery; an
alley; a rooftop; a staircase; a doorbell; a doormat; a coat hanger; a wardrobe; a mattress; a
blanket; a curtain; a shelf; a vase; a thermometer; a ruler; chalk; a blackboard; an eraser;
glue; a dictionary; a footnote; a comma
"""


def train() -> list[Row]:
    """Return 60 topics to train on."""
    return _rows(TRAIN)


def validation() -> list[Row]:
    """Return 20 topics for choosing hyperparameters; no result is measured on them."""
    return _rows(VALIDATION)


def test() -> list[Row]:
    """Return the topics that results are measured on."""
    return _rows(TEST)


def _rows(text: str) -> list[Row]:
    return [{"prompt": " ".join(topic.split())} for topic in text.split(";")]
