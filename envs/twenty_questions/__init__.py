"""Twenty questions about things in a table, answered by the table or by any model."""

from envs.twenty_questions.answerer import (
    Answerer,
    MakeAnswerer,
    Model,
    ModelAnswerer,
    TableAnswerer,
    answered_by,
)
from envs.twenty_questions.answers import answer_about, property_asked, thing_guessed
from envs.twenty_questions.game import COST, TwentyQuestionsEnv, make_env, opening
from envs.twenty_questions.knowledge import KNOWLEDGE, PROPERTIES, THINGS, Answer
from envs.twenty_questions.players import (
    Player,
    demonstrate,
    mixed_player,
    possible,
    random_player,
    splitting_player,
)
from envs.twenty_questions.tasks import Split, tasks

__all__ = [
    "COST",
    "KNOWLEDGE",
    "PROPERTIES",
    "THINGS",
    "Answer",
    "Answerer",
    "MakeAnswerer",
    "Model",
    "ModelAnswerer",
    "Player",
    "Split",
    "TableAnswerer",
    "TwentyQuestionsEnv",
    "answer_about",
    "answered_by",
    "demonstrate",
    "make_env",
    "mixed_player",
    "opening",
    "possible",
    "property_asked",
    "random_player",
    "splitting_player",
    "tasks",
    "thing_guessed",
]
