"""`drafthead serve` as a process, with OpenAI's own client, a browser, and an end by a signal."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import ServerProcess, started

from drafthead.infer import Decoder

pytestmark = pytest.mark.slow

TARGET = Path(__file__).parents[2] / "assets/demo_target"
COMMAND = (
    f"{sys.executable} -m drafthead.scripts.cli serve --target {TARGET} --dtype float32 "
    "--draft lookup --served-model-name demo --api-key secret --grace 60 --port {port}"
)
MESSAGES = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with started(COMMAND, tmp_path_factory.mktemp("served") / "log") as server:
        server.wait(300)
        yield server


@pytest.fixture(scope="module")
def expected() -> str:
    decoder = Decoder.from_pretrained(TARGET, dtype="float32")
    return decoder.generate(MESSAGES, max_new_tokens=40).texts[0]


def client_of(server: ServerProcess, key: str = "secret") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)


def test_openais_client_reads_whole_answers_streams_and_errors(server, expected) -> None:
    client = client_of(server)
    assert [model.id for model in client.models.list()] == ["demo"]
    asked = {"model": "demo", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert whole.choices[0].message.content == expected
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    usage = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    text = client.completions.create(model="demo", prompt=[[9, 10]], max_tokens=3, echo=True)
    assert text.choices[0].text
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        client.completions.create(model="demo", prompt="a", best_of=2)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "other"})
    with pytest.raises(openai.AuthenticationError):
        client_of(server, "wrong").models.list()


def test_the_page_chats_in_a_browser(server, expected, tmp_path) -> None:
    """Drafted text is green, and a second turn goes on."""
    playwright = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as tools:
        window = tools.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page()
        page.goto(server.url.removesuffix("v1"))
        page.fill("#key", "secret")
        for turn in range(2):
            page.fill("#say", MESSAGES[0]["content"])
            page.keyboard.press("Enter")
            page.wait_for_function(
                "n => document.querySelectorAll('.turn.note').length > n", arg=turn, timeout=60_000
            )
        assert not page.query_selector(".turn.error")
        said = page.query_selector_all(".turn.assistant")[0]
        assert said.text_content().startswith(expected[:20])
        green = said.query_selector(".drafted")
        colour = green.evaluate("node => getComputedStyle(node).color")
        assert colour == "rgb(10, 125, 50)"
        page.screenshot(path=tmp_path / "page.png")
        # A new conversation while an answer streams knows nothing of it.
        page.fill("#say", "Once upon a time")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelectorAll('.drafted').length > 9")
        page.click("#fresh")
        page.fill("#say", "Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.note", timeout=60_000)
        assert "stopped" not in page.text_content("#turns")
        history = page.evaluate("messages")
        assert [turn["role"] for turn in history] == ["user", "assistant"]
        assert history[0]["content"] == "Hello"
        box = page.query_selector("#send").bounding_box()
        assert 0 < box["y"] < page.viewport_size["height"] - box["height"]
        # A refused request leaves no empty answer, and the question to be sent again.
        page.fill("#key", "wrong")
        page.fill("#say", "Again?")
        page.keyboard.press("Enter")
        page.wait_for_selector(".turn.error")
        assert len(page.evaluate("messages")) == 2
        assert page.input_value("#say") == "Again?"
        window.close()


def test_running_answers_end_after_a_signal_and_no_new_ones_begin(tmp_path) -> None:
    with started(COMMAND, tmp_path / "log") as server:
        server.wait(300)
        asked = {"model": "demo", "messages": MESSAGES, "temperature": 1.0, "seed": 1}
        stream = client_of(server).chat.completions.create(
            **asked, stream=True, max_tokens=300, extra_body={"ignore_eos": True}
        )
        chunks = [next(stream), next(stream)]
        ended: list[int] = []
        stopping = threading.Thread(target=lambda: ended.append(server.stop(60)))
        stopping.start()
        time.sleep(0.2)
        chunks += stream
        stopping.join()
        assert chunks[-1].choices[0].finish_reason == "length"
        assert ended == [0]
        with pytest.raises(openai.APIConnectionError):
            client_of(server).models.list()
