"""Words and signs that may stand beside a number; any other makes it another claim.

Most words come from the solutions and questions of GSM8K's training set.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --- before the number, from right to left ---

# What stands before these words decides.
THROUGH_BEFORE = _words(
    """
    a about again all also altogether an approx approximately at aud be been cad clearly eur
    exactly finally gbp hence in inr just now of on only overall roughly rs still the then
    therefore thus to total us usd
    """
)
MARKS_THROUGH_BEFORE = frozenset("\"#$'(*+-[_`{~\xa3\xa5\u20ac\u20b9\u20bd\u2248")
# The words of "the answer is" and "she has": what stands before them does not matter.
ENDS_BEFORE = _words(
    """
    accommodate age allocated allocates am amount amounts answer answered are area arrive ate
    attended average averaged averages back bake baked bakes balance barked be become becomes
    bid bikes book borrowed borrows bought bring brings broke brought build built burned burns
    buy buys came can capacity carried carries carry carrying catch caught caused change charge
    charged charges climb climbed collect collected collects combined come comes completed
    consume consumed consumes contain contained contains contribute contributed cost costs count
    counted cover covered covers cutting cycled delete deliver delivered delivers did difference
    distance do does donate donated donates drank drew drink drinks drive drives dropped drove
    earn earned earns eat eaten eats elevation encountered equal equals evaluates expects
    experienced fed fill filled fills final find finds finish fit fixed fly for found gain
    gained gains gather gathered gave get gets give given gives got grow grown grows had harvest
    harvests has have hears height held her him hit hold holding holds hunts included increase
    increased increases initial ironed is it it's jump jumped keep keeps kept knit knitted last
    lasted lasts learn learned leave leaves leaving left length let's lifted listened live lived
    lose loss lost made make makes making means melt memorized mend missed money move moved
    moves must need needed needs number obtain order ordered owe owed owes own owned owns pack
    paid paint painted paints pay payed pays perform performing pick picked picks placed plant
    planted plants play played polished posted practiced prepare prepared pressure price produce
    produced produces profit profits pulled purchase purchased put radius raise raised raked ran
    reach reaches read reading reads receive received receives releases remain remained
    remaining remains require required requires result return rode run runs salary save saved
    saves savings saw score scored scores seated see seen sell sells send sending sent serve
    served serves sew shipped should simplifies sleep slept so sold solved speed spend spends
    spent standing started step studied studies sum take taken takes taught teach teaches that
    that's them there's they threw throws together took totaling transport travel traveled
    travels use used uses value visited wait walk walked walks was wash washed watch watched
    watches water we weigh weighed weighs weight went were will with withdrew won work worked
    working works worth would write writes wrote yields
    """
)
MARKS_END_BEFORE = frozenset("!),.:;=?]}\u2014\u2022\u2192\u21d2\u2234\u2705")

# In the clause of the number these make another one of it, or deny it: "half: 5", "the wrong answer
# is 5".
CHANGES_BEFORE = _words(
    """
    almost billion cosine cubed double doubled doubt dozen factorial false half halved hundred
    incorrect log million minus mod modulo nearly negative root sine sqrt squared thousand thrice
    triple tripled twice unlikely wrong
    """
)

# --- behind the number ---

# Units and things, in the singular; single letters in the case in which they are units.
UNIT_MARKS = frozenset("$%\xa3\xa5\xb0\u20ac\u20b9\u20bd")
UNITS = UNIT_MARKS | _words(
    """
    C F J L N V W acre adult am animal ant apple aud bag bale ball balloon banana bar basket
    batch bead bird block blue book bottle bouquet box boy bracelet bread brick brownie bus
    button c cad cake calorie can candle candy car card carrot carton case cat celsius cent
    centimeter centimetre chair chapter chicken child children chip chocolate class clip cm coin
    cookie copy costume cow cracker crate crayon cubic cup cupcake customer day degree desk dime
    dl dog doll dollar donut dress drink duck egg employee episode eur euro fahrenheit feather
    feet female fish floor flower follower foot friend frog fruit ft g gal gallon game gbp gift
    girl glass goal goat gram green group guest h hat hectare hen hour house hr hz in inch
    individual inr item jar juice kb kg kgs kid kilo kilogram kilometer kilometre kilowatt km
    kmh knot kph kw kwh l lap large lb lbs leaf leaves leg lemon letter level line liter litre
    loaf loaves m male man marble mark match mb meal member men message meter metre mg mi
    mile milligram milliliter millimeter millisecond min minute ml mm money month movie mph ms
    muffin nd necklace nickel night notebook nut orange ounce oz pack package packet page
    painting pair pancake parent part passenger pen pence pencil penny people percent percentage
    person pet photo piece pill pint pizza plant plate player pm point potato potatoes pound
    present problem pt puppy qt quart question rd red ribbon rock roll room rose round row rupee
    s sandwich seat sec second section seed serving set sheep sheet shell shirt shoe shop side
    slice small song spoon sq square st stamp star step sticker stone story student subject
    sweet table tablespoon task tb tbsp teacher teaspoon th ticket tile time tire toe tomato
    tomatoes ton tonne toy train tree trip tsp turtle unit usd vehicle video visitor volt vote
    water watt way week wheel white wind window woman women word worker yard yd year yellow yen
    yr yuan
    """
)
# What stands behind these words decides.
THROUGH_BEHIND = _words(
    """
    a additional an another different each every extra fewer full more my new other per the
    these whole
    """
)
MARKS_THROUGH_BEHIND = frozenset("\"'()*,:]_`}")
# "5 is the answer", but not "5 is half".
BEHIND_IS = _words("a correct her his how its my our right the their true what your")
# What stands behind these words does not matter.
ENDS_BEHIND = _words(
    """
    all altogether apart are because currently daily deep for here high hourly in is
    left long monthly now old on overall remain remaining remains since so tall that today
    together tomorrow total was weekly were when which wide yearly yesterday
    """
)
MARKS_END_BEHIND = frozenset("!.;?\u2014\u2705\u3002")
# The same, but only behind a unit: "5 of ten" is another number, "5 cups of tea" is not.
ENDS_BEHIND_A_UNIT = _words(
    """
    after apart at away before between by cheaper during faster from he heavier if inside it
    last lighter longer of off older she shorter slower taller than they to until we while who
    with younger
    """
)
# A prompt may hold these words, but they are no units: "5 times", "5 dozen", "5 or".
NEVER_UNITS = _words(
    """
    after all and any are below billion billions billionth but cube cubed divided double doubled
    dozen dozens eight eighth eighths factorial fewer fifth fifths five fold for four fourth
    fourths from gross half halves hundred hundreds hundredth into least less like log many
    million millions millionth minus mod modulo more most much multiplied negative nine ninth
    ninths nor not off one opposite or other out over plus power quadruple quarter quarters
    reciprocal root score seven seventh sevenths short six sixth sixths some square squared ten
    tenth tenths than then third thirds thousand thousands thousandth three times to trillion
    triple tripled twice two under unless up with without zero
    """
)
