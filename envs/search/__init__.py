"""Answer questions from a corpus with a search tool: keyword, exact-vector and Chroma retrievers, or any server."""

from envs.search.answers import is_right, normal_form, read_answer
from envs.search.bm25 import Bm25Retriever
from envs.search.chroma import ChromaRetriever
from envs.search.chroma_server import ChromaServerRetriever
from envs.search.corpus import Corpus, JsonLines, Passage
from envs.search.demonstration import careless_queries, demonstrate, good_queries
from envs.search.embedder import Embedder, HashedEmbedder, WordLlamaEmbedder
from envs.search.exact import ExactRetriever
from envs.search.factbook import Factbook
from envs.search.game import INSTRUCTIONS, MAX_QUERIES, MAX_QUERY_LENGTH, NOTHING, Rules, SearchEnv, make_env
from envs.search.http_retriever import HttpRetriever
from envs.search.index import default_root
from envs.search.question_file import read_questions
from envs.search.questions import FIELDS, HOPS, Split, pool, split_of, tasks
from envs.search.retriever import Hit, Retriever
from envs.search.wire import Server

__all__ = [
    "FIELDS",
    "HOPS",
    "INSTRUCTIONS",
    "MAX_QUERIES",
    "MAX_QUERY_LENGTH",
    "NOTHING",
    "Bm25Retriever",
    "ChromaRetriever",
    "ChromaServerRetriever",
    "Corpus",
    "Embedder",
    "ExactRetriever",
    "Factbook",
    "HashedEmbedder",
    "Hit",
    "HttpRetriever",
    "JsonLines",
    "Passage",
    "Retriever",
    "Rules",
    "SearchEnv",
    "Server",
    "Split",
    "WordLlamaEmbedder",
    "careless_queries",
    "default_root",
    "demonstrate",
    "good_queries",
    "is_right",
    "make_env",
    "normal_form",
    "pool",
    "read_answer",
    "read_questions",
    "split_of",
    "tasks",
]
