"""What is known: things, and which of a list of properties each has. Written by hand for this game.

A thing is described by its kind, which brings properties along, and by what sets it apart: a bare word is a property
it has besides, "-word" one it lacks although its kind has it, "?word" one that people would argue about. Whatever is
not mentioned it does not have. Knows no question in words: see `answers`.
"""

from collections.abc import Mapping
from enum import Enum


class Answer(Enum):
    """What a question can be answered with; the value is what the player hears."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


PROPERTIES: Mapping[str, tuple[str, ...]] = {
    "alive": ("alive", "living"),
    "animal": ("animal", "animals", "creature"),
    "mammal": ("mammal", "mammals"),
    "bird": ("bird", "birds"),
    "insect": ("insect", "insects", "bug"),
    "plant": ("plant", "plants", "grow in the ground"),
    "food": ("food", "edible", "eat it", "eaten", "can you eat"),
    "fruit": ("fruit", "fruits"),
    "sweet": ("sweet", "sugary"),
    "vehicle": ("vehicle", "vehicles", "transport", "ride in it"),
    "wheels": ("wheels", "wheel", "wheeled"),
    "tool": ("tool", "tools"),
    "furniture": ("furniture",),
    "clothing": ("clothing", "clothes", "wear it", "worn", "garment"),
    "music": ("music", "musical", "instrument"),
    "electric": ("electric", "electrical", "electricity", "electronic", "battery"),
    "metal": ("metal", "metallic", "steel", "iron"),
    "wood": ("wood", "wooden"),
    "flies": ("fly", "flies", "flying"),
    "swims": ("swim", "swims", "swimming", "float", "floats", "water"),
    "legs": ("legs", "leg", "feet"),
    "fur": ("fur", "furry", "hair", "hairy"),
    "pet": ("pet", "pets"),
    "farm": ("farm", "farms"),
    "dangerous": ("dangerous", "danger", "deadly"),
    "big": ("big", "bigger", "large", "larger", "huge"),
    "small": ("small", "tiny", "little", "fit in a hand", "hold it"),
    "indoors": ("indoors", "inside", "house", "home", "kitchen"),
    "made": ("made", "man-made", "manmade", "artificial", "manufactured"),
    "round": ("round", "circular", "spherical"),
}
"""Property -> the words of a question that ask for it."""

_KINDS: Mapping[str, str] = {
    "mammal": "alive animal mammal legs fur",
    "bird": "alive animal bird legs flies",
    "insect": "alive animal insect legs small",
    "fish": "alive animal swims",
    "reptile": "alive animal",
    "plant": "alive plant",
    "fruit": "plant food fruit sweet small ?alive",
    "vegetable": "plant food small farm ?alive",
    "dish": "food made indoors",
    "vehicle": "vehicle made big metal",
    "tool": "tool made small metal indoors",
    "furniture": "furniture made indoors",
    "clothing": "clothing made indoors",
    "music": "music made indoors",
    "machine": "made electric metal indoors",
    "object": "made small indoors",
    "nature": "big",
}
"""Kind -> what its things have."""

_THINGS: Mapping[str, str] = {
    "dog": "mammal: pet indoors ?dangerous ?swims ?big",
    "cat": "mammal: pet indoors",
    "horse": "mammal: farm big ?pet",
    "cow": "mammal: farm big",
    "sheep": "mammal: farm",
    "elephant": "mammal: big dangerous -fur",
    "lion": "mammal: big dangerous",
    "mouse": "mammal: small ?pet ?indoors",
    "bat": "mammal: flies small",
    "whale": "mammal: swims big -legs -fur",
    "chicken": "bird: farm food -flies",
    "eagle": "bird: ?dangerous",
    "parrot": "bird: pet indoors",
    "penguin": "bird: swims -flies",
    "duck": "bird: swims farm food",
    "bee": "insect: flies ?dangerous ?farm",
    "ant": "insect:",
    "butterfly": "insect: flies ?legs",
    "shark": "fish: big dangerous",
    "salmon": "fish: food",
    "goldfish": "fish: pet indoors small",
    "snake": "reptile: dangerous ?pet ?swims",
    "crocodile": "reptile: legs swims big dangerous",
    "frog": "reptile: legs swims small",
    "tree": "plant: big wood",
    "rose": "plant: small ?indoors",
    "cactus": "plant: ?dangerous indoors",
    "grass": "plant: farm small",
    "apple": "fruit: round farm",
    "banana": "fruit:",
    "lemon": "fruit: -sweet",
    "watermelon": "fruit: round big -small",
    "carrot": "vegetable: ?sweet",
    "potato": "vegetable: ?round",
    "onion": "vegetable: round",
    "bread": "dish: ?small",
    "cake": "dish: sweet ?round",
    "pizza": "dish: round",
    "cheese": "dish: farm ?small",
    "chocolate": "dish: sweet small",
    "car": "vehicle: wheels ?electric dangerous",
    "bicycle": "vehicle: wheels -big",
    "train": "vehicle: wheels electric",
    "airplane": "vehicle: wheels flies",
    "boat": "vehicle: swims ?wood ?metal",
    "rocket": "vehicle: flies dangerous",
    "hammer": "tool: wood",
    "knife": "tool: dangerous",
    "saw": "tool: dangerous wood",
    "spoon": "tool: ?round",
    "chair": "furniture: legs wood",
    "table": "furniture: legs wood big ?round",
    "bed": "furniture: legs big ?wood ?metal",
    "mirror": "furniture: ?round -big ?wood",
    "shoe": "clothing:",
    "hat": "clothing: round",
    "glove": "clothing: small",
    "coat": "clothing: big ?fur",
    "guitar": "music: wood",
    "piano": "music: wood big legs",
    "drum": "music: round",
    "trumpet": "music: metal",
    "phone": "machine: small",
    "television": "machine: big -metal",
    "refrigerator": "machine: big",
    "lamp": "machine: -metal ?round",
    "clock": "machine: round ?small",
    "book": "object:",
    "pencil": "object: wood tool",
    "ball": "object: round -indoors ?swims",
    "coin": "object: round metal",
    "key": "object: metal",
    "moon": "nature: round",
    "mountain": "nature: ?dangerous",
    "river": "nature: swims",
}
"""Thing -> "kind: what sets it apart"."""


def _described(description: str) -> dict[str, Answer]:
    kind, _, apart = description.partition(":")
    known = dict.fromkeys(PROPERTIES, Answer.NO)
    for word in f"{_KINDS[kind]} {apart}".split():
        answer = {"-": Answer.NO, "?": Answer.UNKNOWN}.get(word[0], Answer.YES)
        name = word.lstrip("-?")
        if name not in PROPERTIES:
            raise ValueError(f"{description!r} mentions {name!r}, which is not among the properties")
        known[name] = answer
    return known


KNOWLEDGE: Mapping[str, Mapping[str, Answer]] = {thing: _described(words) for thing, words in _THINGS.items()}
"""Thing -> property -> whether it has it."""

THINGS = tuple(KNOWLEDGE)
