"""Small stories from a seeded grammar: a hero, a place, a trouble, a friend, an end. Knows no model."""

import random
from dataclasses import dataclass
from itertools import pairwise

from .facts import Words

HER = ("she", "She", "her", "her")

OPENINGS = (
    "Once upon a time there was a {trait} {hero} named {name}, who lived {home}.",
    "Once upon a time, {home}, there lived a {trait} {hero} named {name}.",
    "Once upon a time a {trait} {hero} named {name} lived {home}.",
    "There once was a {trait} {hero} named {name}, who lived {home}.",
    "Long ago a {trait} {hero} named {name} lived {home}.",
)
ENDINGS = (
    "And from that day on, {name} and {friend_name} were the best of friends.",
    "That night {name} fell asleep with a smile.",
    "And {name} never forgot that day.",
    "And so they lived happily ever after.",
    "Since then {name} and {friend_name} have tea together every evening.",
)
MORALS = (
    "A good friend makes every road shorter.",
    "Even the smallest helper can do great things.",
    "Those who share are never poor.",
    "Patience finds what haste has lost.",
    "It is never wrong to ask for help.",
    "Kindness always finds its way back.",
)

# A plot is a row of moments; each moment can be told in several ways.
Plot = tuple[tuple[str, ...], ...]
LOST: Plot = (
    (
        "One morning {name} saw that {his} {treasure} was gone.",
        "One day {name} could not find {his} {treasure}.",
    ),
    (
        "{He} looked under the bed, behind the door and in the tall grass, but it was nowhere.",
        "{He} searched everywhere, but it was nowhere to be found.",
    ),
    (
        'Then a {friend} named {friend_name} came by and said, "Let us look together."',
        'A {friend} named {friend_name} heard {him} cry and said, "Do not worry, I will help you."',
    ),
    (
        "They followed the tiny tracks in the sand until they came to a hollow tree.",
        "They walked along the path, step by step, and looked at every stone.",
    ),
    (
        "And there lay the {treasure}, shining in the sun.",
        "There it was: the {treasure}, safe and dry under a leaf.",
    ),
    ('"Thank you!" said {name}. "Alone I would have given up."', "{name} danced with joy and hugged {friend_name}."),
)
STORM: Plot = (
    ("One evening a great storm came over the land.", "One night the wind began to howl and the rain fell in sheets."),
    (
        "{name} heard a knock at the door, and outside stood a wet {friend} named {friend_name}.",
        "In the dark {name} found a {friend} named {friend_name}, cold and tired.",
    ),
    (
        '"My home was blown away," said {friend_name}. "May I stay here?"',
        '"I have lost my way," said {friend_name}. "Can you help me?"',
    ),
    (
        "{name} had only one blanket and a little soup, but {he} shared both.",
        "{name} made a fire and gave {friend_name} the warmest place beside it.",
    ),
    (
        "In the morning the sun was out, and together they built a new house of wood and straw.",
        "When the storm was over, they repaired the roof together and sang all the while.",
    ),
)
JOURNEY: Plot = (
    (
        "{name} had always wanted to see what lay behind the hills.",
        "Every night {name} dreamed of seeing the great sea.",
    ),
    (
        "So one day {he} packed some bread and {his} {treasure}, and set out.",
        "One bright morning {he} put {his} {treasure} in a bag and began to walk.",
    ),
    (
        "On the way {he} met a {friend} named {friend_name}, who was stuck in the mud.",
        "At a crossing sat a {friend} named {friend_name}, who did not know where to go.",
    ),
    (
        "{name} stopped and helped, although it was getting late.",
        '"Come with me," said {name}, and they went on together.',
    ),
    (
        "When they reached the top of the last hill, the whole world lay before them, golden in the evening light.",
        "At last they stood on the shore, and the water was wider than they had ever imagined.",
    ),
    (
        '"It is beautiful," said {friend_name}. "And it is better with a friend," said {name}.',
        "They sat there without a word until the stars came out.",
    ),
)
CONTEST: Plot = (
    (
        "Every year there was a great race, and everyone said that {name} was too slow to win.",
        "One spring a race was held, and the others laughed when {name} came to the start.",
    ),
    (
        "{name} did not mind and practised every morning.",
        '"I will try all the same," said {name}.',
    ),
    (
        "On the day of the race, {he} saw that a {friend} named {friend_name} had fallen into a ditch.",
        "In the middle of the race a {friend} named {friend_name} stumbled and could not get up.",
    ),
    (
        "All the others ran past, but {name} stopped and helped.",
        "{name} turned back and gave {friend_name} a hand.",
    ),
    (
        "They crossed the line together, the last of all, and everyone cheered for them.",
        "They came in last, arm in arm, and the crowd clapped louder than ever before.",
    ),
    (
        "The prize was a {treasure}, and the winner gave it to {name}.",
        "The judge smiled and gave {name} a {treasure} for a good heart.",
    ),
)
FEAR: Plot = (
    ("{name} was afraid of the dark.", "There was only one thing that {name} feared: the dark."),
    (
        "Every evening {he} closed the windows and hid under the blanket.",
        "When the sun went down, {he} ran home as fast as {he} could.",
    ),
    (
        'One night a {friend} named {friend_name} knocked and said, "Come out, I want to show you something."',
        'Then {he} met a {friend} named {friend_name}, who said, "The night has its own lights."',
    ),
    (
        "{name} took {his} {treasure} in one hand and all {his} courage in the other, and followed.",
        "{name} took a deep breath and went out, one step at a time.",
    ),
    (
        "Above them shone a thousand stars, and fireflies danced over the grass.",
        "The moon was round and bright, and the whole land was silver.",
    ),
    ('"So the dark is full of light," said {name}, and was not afraid any more.',),
)
GARDEN: Plot = (
    (
        "In spring {name} found a strange seed and planted it behind the house.",
        "One day the wind dropped a tiny seed at {name}'s feet, and {he} put it into the ground.",
    ),
    ("{He} gave it water every day, but nothing happened.", "Day after day {he} watched over it, but nothing grew."),
    (
        '"Give up," said the others, but a {friend} named {friend_name} said, "Wait a little longer."',
        'A {friend} named {friend_name} came by and said, "Good things take their time."',
    ),
    (
        "So they waited together and told each other stories.",
        "So {name} waited, and {friend_name} kept {him} company.",
    ),
    (
        "Then, one warm night, a green leaf broke through the earth, and soon there stood a tree full of sweet apples.",
        "And one morning there stood a flower, as tall as a house and as yellow as the sun.",
    ),
)
PLOTS: tuple[Plot, ...] = (LOST, STORM, JOURNEY, CONTEST, FEAR, GARDEN)

ASKED_WITH_HERO = (
    "Tell me a story about {hero}.",
    "Tell me a story about {hero}",
    "Tell me a short story about {hero}.",
    "Write a story about {hero}.",
    "Write a short story about {hero}.",
    "Can you tell me a story about {hero}?",
    "Please tell me a story about {hero}.",
    "I want a story about {hero}.",
    "Make up a story about {hero}.",
    "A story about {hero}, please.",
    "Do you know a story about {hero}?",
    "tell me a story about {hero}",
)
ASKED_WITHOUT = (
    "Tell me a story.",
    "Tell me a story",
    "Tell me another story.",
    "Tell me a bedtime story.",
    "Tell me a short story.",
    "Write a story.",
    "Write a short story.",
    "Can you tell me a story?",
    "I want to hear a story.",
    "Once upon a time",
    "Tell me a fairy tale.",
    "A story, please.",
)


@dataclass(frozen=True, slots=True)
class Story:
    prompt: str
    text: str


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def make_story(words: Words, rng: random.Random) -> Story:
    """Make a story and a prompt that asks for it."""
    is_boy = rng.random() < 0.5
    name, friend_name = rng.choice(words["boy" if is_boy else "girl"]), rng.choice(words["boy"] + words["girl"])
    while friend_name == name:
        friend_name = rng.choice(words["boy"] + words["girl"])
    hero, friend = rng.sample(words["hero"], 2)
    cast = {"hero": hero, "name": name, "friend": friend, "friend_name": friend_name}
    cast |= {kind: rng.choice(words[kind]) for kind in ("trait", "home", "treasure")}
    cast |= dict(zip(("he", "He", "his", "him"), ("he", "He", "his", "him") if is_boy else HER, strict=True))
    moments = [rng.choice(OPENINGS), *(rng.choice(told) for told in rng.choice(PLOTS)), rng.choice(ENDINGS)]
    if rng.random() < 0.4:
        moments.append(rng.choice(MORALS))
    return Story(_prompt(cast, rng), fix_articles(" ".join(moments).format(**cast)))


def fix_articles(text: str) -> str:
    """'a old owl' becomes 'an old owl'."""
    tokens = text.split(" ")
    for at, (article, noun) in enumerate(pairwise(tokens)):
        if article in ("a", "A") and noun[0] in "aeiou":
            tokens[at] = article + "n"
    return " ".join(tokens)


def _prompt(cast: dict[str, str], rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.25:
        return rng.choice(ASKED_WITHOUT)
    hero = with_article(cast["hero"])
    if roll < 0.40:
        hero = with_article(f"{cast['trait']} {cast['hero']}")
    elif roll < 0.55:
        hero = f"{hero} named {cast['name']}"
    elif roll < 0.60:
        hero = cast["name"]
    return rng.choice(ASKED_WITH_HERO).format(hero=hero)
