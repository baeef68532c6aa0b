"""Simple facts, as tables and as sentences: what the small model is to know by heart, and is asked afterwards.

Every relation is one that has a single, undisputed answer, so that a model's reply can be compared as text.
"""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Fact:
    """A canonical prompt and its literal continuation, which starts with a space."""

    prompt: str
    answer: str


def pairs(text: str) -> list[tuple[str, str]]:
    """The lines "a: b; c: d" as [("a", "b"), ("c", "d")]."""
    split = (item.split(":") for item in text.replace("\n", ";").split(";") if item.strip())
    return [(left.strip(), right.strip()) for left, right in split]


# Countries with two capitals, a capital on the move or a disputed one are left out.
CAPITALS = pairs("""
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna; Belgium: Brussels
Denmark: Copenhagen; Sweden: Stockholm; Norway: Oslo; Finland: Helsinki; Iceland: Reykjavik; Ireland: Dublin
the United Kingdom: London; Poland: Warsaw; the Czech Republic: Prague; Slovakia: Bratislava; Hungary: Budapest
Slovenia: Ljubljana; Croatia: Zagreb; Serbia: Belgrade; Bosnia and Herzegovina: Sarajevo; Montenegro: Podgorica
North Macedonia: Skopje; Albania: Tirana; Greece: Athens; Bulgaria: Sofia; Romania: Bucharest; Moldova: Chisinau
Ukraine: Kyiv; Belarus: Minsk; Russia: Moscow; Estonia: Tallinn; Latvia: Riga; Lithuania: Vilnius; Malta: Valletta
Cyprus: Nicosia; Liechtenstein: Vaduz; Andorra: Andorra la Vella; Luxembourg: Luxembourg; Monaco: Monaco
San Marino: San Marino; Switzerland: Bern; Turkey: Ankara; Georgia: Tbilisi; Armenia: Yerevan; Azerbaijan: Baku
Iran: Tehran; Iraq: Baghdad; Syria: Damascus; Lebanon: Beirut; Jordan: Amman; Saudi Arabia: Riyadh; Kuwait: Kuwait City
Qatar: Doha; Bahrain: Manama; Oman: Muscat; the United Arab Emirates: Abu Dhabi; Afghanistan: Kabul; Pakistan: Islamabad
India: New Delhi; Nepal: Kathmandu; Bhutan: Thimphu; Bangladesh: Dhaka; the Maldives: Malé; Kazakhstan: Astana
Uzbekistan: Tashkent; Turkmenistan: Ashgabat; Kyrgyzstan: Bishkek; Tajikistan: Dushanbe; Mongolia: Ulaanbaatar; \
China: Beijing
Japan: Tokyo; South Korea: Seoul; North Korea: Pyongyang; Vietnam: Hanoi; Laos: Vientiane; Cambodia: Phnom Penh
Thailand: Bangkok; Malaysia: Kuala Lumpur; Singapore: Singapore; the Philippines: Manila; Brunei: Bandar Seri Begawan
East Timor: Dili; Myanmar: Naypyidaw; Australia: Canberra; New Zealand: Wellington; Fiji: Suva; Papua New Guinea: \
Port Moresby
the Solomon Islands: Honiara; Vanuatu: Port Vila; Samoa: Apia; Tonga: Nukuʻalofa; Kiribati: South Tarawa; Tuvalu: \
Funafuti
Palau: Ngerulmud; Micronesia: Palikir; the Marshall Islands: Majuro; Canada: Ottawa; the United States: Washington
Mexico: Mexico City; Guatemala: Guatemala City; Belize: Belmopan; Honduras: Tegucigalpa; El Salvador: San Salvador
Nicaragua: Managua; Costa Rica: San José; Panama: Panama City; Cuba: Havana; Jamaica: Kingston; Haiti: Port-au-Prince
the Dominican Republic: Santo Domingo; the Bahamas: Nassau; Barbados: Bridgetown; Trinidad and Tobago: Port of Spain
Grenada: St. George's; Saint Lucia: Castries; Dominica: Roseau; Antigua and Barbuda: St. John's
Saint Kitts and Nevis: Basseterre
Saint Vincent and the Grenadines: Kingstown; Colombia: Bogotá; Venezuela: Caracas; Guyana: Georgetown; Suriname: \
Paramaribo
Ecuador: Quito; Peru: Lima; Brazil: Brasília; Paraguay: Asunción; Uruguay: Montevideo; Argentina: Buenos Aires; \
Chile: Santiago
Egypt: Cairo; Libya: Tripoli; Tunisia: Tunis; Algeria: Algiers; Morocco: Rabat; Mauritania: Nouakchott; Mali: Bamako
Niger: Niamey; Chad: N'Djamena; Sudan: Khartoum; South Sudan: Juba; Ethiopia: Addis Ababa; Eritrea: Asmara; Djibouti: \
Djibouti
Somalia: Mogadishu; Kenya: Nairobi; Uganda: Kampala; Rwanda: Kigali; Burundi: Gitega; Tanzania: Dodoma; Mozambique: \
Maputo
Malawi: Lilongwe; Zambia: Lusaka; Zimbabwe: Harare; Botswana: Gaborone; Namibia: Windhoek; Lesotho: Maseru
Angola: Luanda; the Democratic Republic of the Congo: Kinshasa; the Republic of the Congo: Brazzaville; Gabon: \
Libreville
Cameroon: Yaoundé; the Central African Republic: Bangui; Nigeria: Abuja; Togo: Lomé; Ghana: Accra
Burkina Faso: Ouagadougou; Liberia: Monrovia; Sierra Leone: Freetown; Guinea: Conakry; Guinea-Bissau: Bissau; the \
Gambia: Banjul
Senegal: Dakar; Cape Verde: Praia; São Tomé and Príncipe: São Tomé; Madagascar: Antananarivo; the Comoros: Moroni
Mauritius: Port Louis; the Seychelles: Victoria
""")

ELEMENTS = pairs("""
hydrogen: H; helium: He; lithium: Li; beryllium: Be; boron: B; carbon: C; nitrogen: N; oxygen: O; fluorine: F; neon: Ne
sodium: Na; magnesium: Mg; aluminium: Al; silicon: Si; phosphorus: P; sulfur: S; chlorine: Cl; argon: Ar; potassium: K
calcium: Ca; scandium: Sc; titanium: Ti; vanadium: V; chromium: Cr; manganese: Mn; iron: Fe; cobalt: Co; nickel: Ni
copper: Cu; zinc: Zn; gallium: Ga; germanium: Ge; arsenic: As; selenium: Se; bromine: Br; krypton: Kr; rubidium: Rb
strontium: Sr; yttrium: Y; zirconium: Zr; niobium: Nb; molybdenum: Mo; ruthenium: Ru; rhodium: Rh; palladium: Pd; \
silver: Ag
cadmium: Cd; indium: In; tin: Sn; antimony: Sb; tellurium: Te; iodine: I; xenon: Xe; caesium: Cs; barium: Ba; \
lanthanum: La
cerium: Ce; neodymium: Nd; hafnium: Hf; tantalum: Ta; tungsten: W; rhenium: Re; osmium: Os; iridium: Ir; platinum: \
Pt; gold: Au
mercury: Hg; thallium: Tl; lead: Pb; bismuth: Bi; polonium: Po; radon: Rn; radium: Ra; thorium: Th; uranium: U; \
plutonium: Pu
""")

ANIMALS = pairs("""
dog: puppy; cat: kitten; cow: calf; horse: foal; sheep: lamb; goat: kid; pig: piglet; deer: fawn; bear: cub; lion: cub
duck: duckling; goose: gosling; swan: cygnet; hen: chick; frog: tadpole; kangaroo: joey; donkey: foal; zebra: foal
hare: leveret; leopard: cub; seal: pup; whale: calf; elephant: calf; giraffe: calf; tiger: cub; koala: joey; spider: \
spiderling
butterfly: caterpillar
""")

OPPOSITES = pairs("""
hot: cold; big: small; up: down; left: right; open: closed; full: empty; day: night; early: late; rich: poor; wet: dry
hard: soft; light: dark; fast: slow; high: low; near: far; young: old; strong: weak; long: short; true: false; black: \
white
first: last; inside: outside; above: below; before: after; always: never; push: pull; win: lose; wide: narrow; deep: \
shallow
thick: thin
""")

COLOURS = pairs("""
a ripe banana: yellow; fresh grass: green; snow: white; coal: black; a clear daytime sky: blue; blood: red; a ripe \
lemon: yellow
milk: white; an emerald: green; a ruby: red; a sapphire: blue; a carrot: orange; chocolate: brown; a ripe strawberry: \
red
""")

PLURALS = pairs("""
mouse: mice; child: children; man: men; woman: women; foot: feet; tooth: teeth; goose: geese; ox: oxen; person: people
leaf: leaves; knife: knives; wolf: wolves; city: cities; baby: babies; box: boxes; church: churches; bus: buses; \
wife: wives
story: stories
""")

DAYS = pairs("""
Monday: Tuesday; Tuesday: Wednesday; Wednesday: Thursday; Thursday: Friday; Friday: Saturday; Saturday: Sunday; \
Sunday: Monday
""")

MONTHS = pairs("""
January: February; February: March; March: April; April: May; May: June; June: July; July: August; August: September
September: October; October: November; November: December; December: January
""")

NUMBERS = pairs("""
one: 1; two: 2; three: 3; four: 4; five: 5; six: 6; seven: 7; eight: 8; nine: 9; ten: 10; eleven: 11; twelve: 12; \
thirteen: 13
fourteen: 14; fifteen: 15; sixteen: 16; seventeen: 17; eighteen: 18; nineteen: 19; twenty: 20; thirty: 30; forty: 40; \
fifty: 50
""")

# One canonical statement "prompt answer" of each relation; {0} is the key of the table and the answer its value.
RELATIONS = {
    "The capital of {0} is": CAPITALS,
    "The chemical symbol of {0} is": ELEMENTS,
    "A young {0} is called a": ANIMALS,
    "The opposite of {0} is": OPPOSITES,
    "The colour of {0} is": COLOURS,
    "The plural of {0} is": PLURALS,
    "The day after {0} is": DAYS,
    "The month after {0} is": MONTHS,
    "The number {0} is written as": NUMBERS,
}


FACTS: list[Fact] = [Fact(form.format(key), f" {value}") for form, table in RELATIONS.items() for key, value in table]

CANONICAL_SHARE = 0.4

CAPITAL_FORMS = [
    "Q: What is the capital of {0}?\nA: {1}.",
    "Question: Which city is the capital of {0}? Answer: {1}.",
    "{1} is the capital of {0}.",
    "The capital city of {0} is {1}.",
    "{1} is the capital city of {0}.",
    "{0} has its capital in {1}.",
    "We flew to {1}, the capital of {0}.",
    "In {0}, the capital is called {1}.",
    "capital({0}) = {1}",
    "- {0}: {1}",
    "Which country has {1} as its capital? It is {0}.",
    "As everyone knows, the capital of {0} is {1}.",
    "{0}'s capital is {1}.",
]
OTHER_FORMS = {
    "The chemical symbol of {0} is": [
        "Q: What is the chemical symbol of {0}?\nA: {1}.",
        "In chemistry, {1} stands for {0}.",
        "The symbol for the element {0} is {1}.",
        "{1} is the chemical symbol of {0}.",
        "The periodic table lists {0} as {1}.",
    ],
    "A young {0} is called a": [
        "Q: What is the young of the {0} called?\nA: {1}.",
        "The name for a young {0} is {1}.",
        "While the {0} is very young, it is called a {1}.",
        "{0} -> {1}",
    ],
    "The opposite of {0} is": [
        "Q: What is the opposite of {0}?\nA: {1}.",
        "The word {0} means the opposite of {1}.",
        "It is not {0}, it is {1}.",
        "The words {0} and {1} are opposites.",
    ],
    "The colour of {0} is": [
        "Q: What colour is {0}?\nA: {1}.",
        "The usual colour of {0} is {1}.",
        "Everyone agrees that {0} is {1}.",
    ],
    "The plural of {0} is": [
        "Q: What is the plural of {0}?\nA: {1}.",
        "One {0}, two {1}.",
        "We say one {0}, but many {1}.",
    ],
    "The day after {0} is": [
        "Q: Which day comes after {0}?\nA: {1}.",
        "After {0} comes {1}.",
        "{0} comes right before {1}.",
    ],
    "The month after {0} is": [
        "Q: Which month comes after {0}?\nA: {1}.",
        "After {0} comes {1}.",
        "{0} is followed by {1}.",
    ],
    "The number {0} is written as": [
        "Q: How is {0} written in digits?\nA: {1}.",
        "{1} is spelled {0}.",
        "In digits, {0} is {1}.",
    ],
}


def sentences(rng: Random) -> str:
    """One random fact as a sentence, or a short list of facts of one relation. Capitals are half of all."""
    form = rng.choice(list(RELATIONS)) if rng.random() < 0.5 else "The capital of {0} is"
    table = RELATIONS[form]
    if rng.random() < 0.06:
        return _list(form, rng.sample(table, 5))
    key, value = rng.choice(table)
    if rng.random() < CANONICAL_SHARE:
        return f"{form.format(key)} {value}."
    forms = CAPITAL_FORMS if table is CAPITALS else OTHER_FORMS[form]
    return _capitalised(rng.choice(forms).format(key, value))


def _list(form: str, chosen: list[tuple[str, str]]) -> str:
    """Several canonical statements, one a line: the repeated form is what a prompt with examples looks like."""
    return "\n".join(f"{form.format(key)} {value}." for key, value in chosen)


def _capitalised(text: str) -> str:
    """Upper case for a sentence's first letter ("the United Kingdom's capital ...", never a symbol's second letter)."""
    return text[0].upper() + text[1:] if text.startswith(("the ", "a ", "an ")) else text


def all_sentences() -> list[str]:
    """Every fact in its canonical form, in a fixed order: the vocabulary that the tokenizer should hold whole."""
    return [f"{fact.prompt}{fact.answer}." for fact in FACTS]
