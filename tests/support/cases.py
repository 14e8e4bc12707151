"""Math problems with worked solutions, for tests of `audit`."""

from litgrpo.audit.cases import Problem

# Written for this test; naive answer parsers fail on the last two.
WORKED = [
    ("Ann has 3 bags of 4 nuts. How many nuts?", "She has 3*4=<<3*4=12>>12 nuts.\n#### 12"),
    ("A pen costs $2. How much are 9 pens?", "They are 9*2=<<9*2=18>>18 dollars.\n#### 18"),
    ("Half of 90 birds left. How many stay?", "90/2=<<90/2=45>>45 birds stay.\n#### 45"),
    ("A train runs 7 hours at 60 mph. How far?", "It runs 7*60=<<7*60=420>>420 miles.\n#### 420"),
    ("Bo earns $20 a day for 9 days. How much?", "He earns 20*9=<<20*9=180>>180.\n#### 180"),
    ("Cy had 50 cards and lost 11. How many?", "He has 50-11=<<50-11=39>>39 cards.\n#### 39"),
    ("6 boxes hold 5 cups. How many cups?", "They hold 6*5=<<6*5=30>>30 cups.\n#### 30"),
    ("Di reads 8 pages a day for a week. How many?", "8*7=<<8*7=56>>56 pages.\n#### 56"),
    ("Ed splits 99 by 3. What is it?", "It is 99/3=<<99/3=33>>33 for each.\n#### 33"),
    ("Flo has 17 and finds 5 more. How many?", "She has 17+5=<<17+5=22>>22.\n#### 22"),
    ("27 boxes weigh 40 lb. How much in all?", "27*40=<<27*40=1080>>1,080 lb.\n#### 1,080"),
    ("It was 3 degrees and fell by 10. How warm?", "3-10=<<3-10=-7>>-7 degrees.\n#### -7"),
]


PROBLEMS = [Problem(question, answer) for question, answer in WORKED]
