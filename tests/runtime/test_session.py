"""The bookkeeping of an episode: whatever happens to it, lengths, spans and the prompt's share stay consistent."""

from hypothesis import given
from hypothesis import strategies as st

from jaxrl.runtime.session import Lane, Prompt, Request

STEPS = st.lists(st.tuples(st.sampled_from(["give", "cache", "publish", "rewind", "draw"]), st.integers(0, 9)))


def consistent(lane: Lane) -> bool:
    ends = [end for _, end in lane.spans]
    return (
        len(lane.tokens) == len(lane.given) <= lane.position
        and 0 <= lane.prompt_length <= lane.cached <= len(lane.tokens)
        and ends == sorted(set(ends))
        and (ends[-1] if ends else 0) == lane.cached
        and all(a[0] != b[0] for a, b in zip(lane.spans, lane.spans[1:], strict=False))
    )


@given(st.integers(0, 5), STEPS)
def test_lengths_and_spans_agree_after_any_history(shared: int, steps: list[tuple[str, int]]) -> None:
    lane, version, drawn = Lane(group=1, seed=0), 0, 0
    lane.append(range(6), given=True)
    lane.prompt, lane.prompt_length = Prompt(0, list(range(shared))), shared
    if shared:
        lane.advance(shared, version)
    for step, n in steps:
        before = lane.position
        if step == "give":
            lane.append([n] * n, given=True)
        elif step == "draw":
            lane.append([n], given=False)
        elif step == "cache" and min(n, lane.pending):
            count, given_there = min(n, lane.pending), lane.given[lane.cached :]
            assert lane.advance(count, version) == sum(given_there[:count])
        elif step == "publish":
            version += 1
        elif step == "rewind":
            lane.truncate(min(n, len(lane.tokens)))
        assert consistent(lane)
        assert lane.position >= before, "a draw's index came back, and with it a random number"
        drawn += step == "draw"
    assert sum(not g for g in lane.given) <= drawn


def test_a_request_ends_at_a_stop_id_a_stop_string_or_its_budget() -> None:
    def answered(request: Request, *chunks: list[int]) -> tuple[Lane, Request]:
        lane = Lane(group=None, seed=0, tokens=[9], given=[True], slot=0, request=request)
        for version, chunk in enumerate(chunks):
            lane.advance(len(chunk), version)
            lane.receive(request, chunk, [0.5] * len(chunk), version, lambda ids: "".join(map(str, ids)))
        return lane, request

    lane, request = answered(Request((3,), (), 9, 1.0), [1, 2], [3])
    assert (request.stop, request.done.is_set()) == ("stop", True)
    assert (request.tokens, request.versions, lane.tokens) == ([1, 2, 3], [0, 0, 1], [9, 1, 2, 3])

    lane, request = answered(Request((), ("23",), 9, 1.0), [1, 2], [3, 4, 5])  # completed across two chunks
    assert (request.tokens, request.versions, request.logprobs) == ([1, 2, 3], [0, 0, 1], [0.5] * 3)
    assert (lane.tokens, lane.cached, lane.spans) == ([9, 1, 2, 3], 3, [(0, 2), (1, 3)])
    assert lane.position == 3, "the next index is the one after what was kept, however long the chunk was"
    assert request.stop == "stop"

    _, request = answered(Request((3,), ("7",), 4, 1.0), [1, 2], [4, 5])
    assert (request.stop, request.done.is_set(), request.remaining) == ("length", True, 0)

    _, request = answered(Request((3,), ("7",), 4, 1.0), [1, 2])
    assert (request.done.is_set(), request.remaining) == (False, 2)
