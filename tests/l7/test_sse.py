"""Lesson 7. Server-sent events: what is framed comes back out as it was, line breaks and all."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mini_engine.server.errors import ApiError
from mini_engine.server.sse import COMMENT, EventStream, event
from tests.shared.service import PATIENCE, Service, held, raw_request, read_all, read_events


@pytest.mark.task(1)
def test_an_event_is_data_and_an_empty_line():
    assert event("[DONE]") == b"data: [DONE]\n\n", "`data: `, the text, the end of its line, and an empty line"


@pytest.mark.task(1)
def test_an_event_is_utf_8():
    assert event("Zürich 🚲") == "data: Zürich 🚲\n\n".encode(), "server-sent events are always UTF-8"


@pytest.mark.task(1)
@pytest.mark.parametrize("text", ["one\ntwo", "one\r\ntwo", "one\rtwo", "\n", "a\n\nb", "ends with one\n"])
def test_a_line_break_does_not_end_the_event(text):
    framed = event(text)
    found, why = read_events(framed.decode()), "the reader gets each line, and line feeds between them"
    if framed == f"data: {text}\n\n".encode():
        why = "a line break ended the event, or the rest of the text; give each line a data: of its own"
    assert found == [text.replace("\r\n", "\n").replace("\r", "\n")], f"{text!r} is sent as {framed!r}: {why}"


@pytest.mark.task(1)
@pytest.mark.parametrize("text", ["one\u2028two", "one\x85two", "one\x0btwo", "one\x1ctwo"])
def test_only_cr_and_lf_break_a_line(text):
    found = read_events(event(text).decode())
    assert found == [text], (
        f"{text!r} is read as {found}: only CR LF, LF and CR break a line of an event; splitlines breaks at more"
    )


@pytest.mark.task(1)
@settings(max_examples=50)
@given(texts=st.lists(st.text(), max_size=4))
def test_whatever_is_framed_is_read_as_it_was(texts):
    stream = b"".join(map(event, texts)).decode()
    want = [text.replace("\r\n", "\n").replace("\r", "\n") for text in texts]
    assert read_events(stream) == want, f"the events of {texts!r} are not read as these texts; they are {stream!r}"


async def stays():
    """A client that never leaves."""
    await asyncio.Event().wait()


async def leaves():
    """A client that has gone."""
    return {"type": "http.disconnect"}


def sent(stream: EventStream, receive=stays, noting=lambda messages: None) -> list[dict]:
    """What a stream sends; `noting` is called behind each message."""
    found = []

    async def send(message):
        found.append(message)
        noting(found)
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(stream({}, receive, send), PATIENCE))
    return found


def test_a_stream_is_its_events_and_done():
    async def chunks():
        yield "one"
        yield "two"

    start, *bodies = sent(EventStream(chunks()))
    assert dict(start["headers"])[b"content-type"].startswith(b"text/event-stream")
    assert b"".join(body["body"] for body in bodies) == b"data: one\n\ndata: two\n\ndata: [DONE]\n\n"
    assert [body.get("more_body", False) for body in bodies] == [True, True, False]


def test_a_silence_is_filled_with_comments_and_nothing_follows_the_end():
    two_comments = asyncio.Event()

    async def chunks():
        yield "one"
        await two_comments.wait()
        yield "two"

    def noting(messages):
        if [one.get("body") for one in messages].count(COMMENT) == 2:
            two_comments.set()

    found = sent(EventStream(chunks(), heartbeat=0.001), noting=noting)
    start, first, *comments, _, _ = [message.get("body", "start") for message in found]
    assert (start, first) == ("start", event("one")) and set(comments) == {COMMENT}
    assert found[-1] == {"type": "http.response.body", "body": event("[DONE]")}
    assert read_events(b"".join(message.get("body", b"") for message in found).decode()) == ["one", "two", "[DONE]"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 16}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 16}),
    ],
)
def test_a_stream_that_waits_for_its_first_token_is_kept_alive(path, asked):
    with Service(heartbeat_seconds=0.02) as service, service.dial() as client:
        with held(service.engine.runner, "run"):
            client.sendall(raw_request(asked | {"stream": True}, path))
            content = b""
            while content.count(COMMENT) < 2:
                piece = client.recv(65536)
                assert piece, f"the stream ended without two comments: {content!r}"
                content += piece
        assert b"data: " in (content + read_all(client)).rpartition(COMMENT)[2]


def test_a_stream_that_breaks_off_ends_with_its_error_and_is_not_done():
    async def chunks():
        yield "one"
        raise ApiError(500, "the engine fell over")

    found = sent(EventStream(chunks()))
    content = b"".join(message["body"] for message in found[1:]).decode()
    first, last = read_events(content)
    assert first == "one" and "the engine fell over" in last, "whoever reads it must learn that it is not complete"
    assert "[DONE]" not in content, "clients that look for [DONE] alone would take it for complete"
    assert not found[-1].get("more_body", False)


def test_the_chunks_of_a_client_that_has_gone_are_closed():
    closed, begun = [], asyncio.Event()

    async def chunks():
        try:
            while True:
                yield "more"
                begun.set()
        finally:
            closed.append(True)

    async def leaves_then():
        await begun.wait()
        return await leaves()

    sent(EventStream(chunks()), leaves_then)
    assert closed == [True], "a client that has gone leaves nothing running: close its chunks"


def test_a_stream_whose_client_has_gone_before_it_began_is_closed():
    closed = []

    async def chunks():
        yield "never asked for"

    async def send(message):
        await asyncio.Event().wait()  # the connection takes nothing any more

    stream = EventStream(chunks(), lambda: closed.append(True))
    asyncio.run(asyncio.wait_for(stream({}, leaves, send), PATIENCE))
    assert closed == [True], "chunks that were never begun close nothing: the answers go on for nobody"
