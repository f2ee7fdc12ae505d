"""Test the rewards of images on known images, some in worker processes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.numpy import save_file

from tutelage.errors import UserError
from tutelage.rewards.contract import Answer, Judgement, Media, RewardSpec
from tutelage.rewards.functions import ocr
from tutelage.rewards.functions.classifier import check_options, classifier
from tutelage.rewards.functions.compressibility import jpeg_compressibility, jpeg_incompressibility
from tutelage.rewards.functions.http_scorer import http_scorer
from tutelage.rewards.functions.images import picture
from tutelage.rewards.processes.pool import RewardPool


def drawn(image: NDArray[np.uint8], ground_truth: Any = None) -> Answer:
    return Answer("a picture", "", ground_truth, media=Media(image.tobytes(), image.shape))


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def judged(pool: RewardPool, *answers: Answer) -> list[Judgement]:
    async def main() -> list[Judgement]:
        async with pool:
            return [await pool.score(answer) for answer in answers]

    return asyncio.run(main())


# --- compressibility --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg_size(channels: int) -> None:
    flat, busy = drawn(np.full((channels, 32, 32), 90, np.uint8)), drawn(noise(channels, 32, 32))
    assert jpeg_incompressibility(busy) > 1.5 * jpeg_incompressibility(flat) > 0
    assert jpeg_compressibility(busy) == -jpeg_incompressibility(busy)


def test_channels_come_first_and_height_before_width() -> None:
    """A wide image with colours: Pillow must see what was drawn."""
    image = noise(3, 4, 9)
    seen = picture(drawn(image))
    assert seen.size == (9, 4)
    assert seen.getpixel((5, 2)) == tuple(image[:, 2, 5])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer("q", "text"), "no image"),
        (drawn(noise(2, 3, 8, 8)), "expected one image"),
        (drawn(noise(4, 8, 8)), "4 channels"),
    ],
)
def test_what_is_not_an_image_is_refused(answer: Answer, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jpeg_compressibility(answer)


# --- classifiers ------------------------------------------------------------------------------------------------------


@pytest.fixture
def layers(tmp_path: Path) -> str:
    """Two layers on four pixels: class 0 likes bright left pixels, class 1 bright right ones."""
    tensors = {
        "0.weight": np.eye(4, dtype=np.float32),
        "0.bias": np.full(4, -0.5, np.float32),
        "1.weight": np.array([[2, 0, 2, 0], [0, 2, 0, 2]], np.float32),
        "1.bias": np.array([0.1, 0.0], np.float32),
    }
    (tmp_path / "layers").mkdir()
    save_file(tensors, tmp_path / "layers" / "model.safetensors")
    return str(tmp_path / "layers")


@pytest.fixture
def kernel(tmp_path: Path) -> str:
    """One vector for each class: an image left bright, one right bright."""
    tensors = {
        "vectors": np.array([[1, 0, 1, 0], [0, 1, 0, 1]], np.float32),
        "weight": np.eye(2, dtype=np.float32),
        "bias": np.zeros(2, np.float32),
        "gamma": np.array(0.5, np.float32),
    }
    (tmp_path / "kernel").mkdir()
    save_file(tensors, tmp_path / "kernel" / "model.safetensors")
    return str(tmp_path / "kernel")


LEFT = np.array([[[255, 0], [255, 0]]], np.uint8)


def test_probability_is_that_of_the_network(layers: str) -> None:
    """Bright pixels pass the first layer as ½ each, dark ones as 0: scores 2.1 and 0."""
    expected = math.exp(2.1) / (math.exp(2.1) + 1)
    assert classifier(drawn(LEFT, "0"), model=layers) == pytest.approx(expected, abs=1e-6)
    assert classifier(drawn(LEFT, 1), model=layers) == pytest.approx(1 - expected, abs=1e-6)


def test_correct_is_the_likeliest_class(layers: str, kernel: str) -> None:
    for model in (layers, kernel):
        assert classifier(drawn(LEFT, "0"), model=model, value="correct") == 1.0
        assert classifier(drawn(255 - LEFT, "0"), model=model, value="correct") == 0.0


@pytest.mark.parametrize("truth", [None, "2", -1, "seven", True])
def test_the_ground_truth_is_a_class(layers: str, truth: Any) -> None:
    with pytest.raises(ValueError, match="number of a class, 0 to 1"):
        classifier(drawn(LEFT, truth), model=layers)


def test_an_image_of_another_size_is_refused(layers: str) -> None:
    with pytest.raises(ValueError, match=r"\[1, 3, 3\].*takes 4"):
        classifier(drawn(noise(1, 3, 3), "0"), model=layers)


def test_options_are_checked(layers: str, kernel: str, tmp_path: Path) -> None:
    check_options(model=kernel, value="correct")
    with pytest.raises(ValueError, match="no probabilities"):
        check_options(model=kernel)
    with pytest.raises(ValueError, match="'probability' or 'correct'"):
        check_options(model=layers, value="sure")
    with pytest.raises(ValueError, match="does not exist"):
        check_options(model=str(tmp_path / "nowhere"))
    save_file({"head": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds head; expected"):
        check_options(model=str(tmp_path))


def test_media_reach_the_workers_and_weights_add_up(layers: str, kernel: str) -> None:
    """The gold measure has weight 0: it is reported and plays no part in the reward."""
    specs = {
        "digit": RewardSpec("classifier", 2.0, options={"model": layers, "value": "correct"}),
        "small": RewardSpec("jpeg_compressibility", 0.5),
        "gold": RewardSpec("classifier", 0.0, options={"model": kernel, "value": "correct"}),
    }
    pool = RewardPool(specs)
    good, text = judged(pool, drawn(LEFT, "0"), Answer("a picture", "words", "0"))
    small = jpeg_compressibility(drawn(LEFT))
    assert good.parts == {"digit": 1.0, "small": small, "gold": 1.0}
    assert good.reward == pytest.approx(2.0 + 0.5 * small)
    assert text.reward is None
    assert "no image" in str(text.failure)
    assert (pool.counts["scored"], pool.counts["raised"]) == (1, 1)


def test_random_numbers_of_a_reward_depend_on_the_image(tmp_path: Path) -> None:
    plugin = tmp_path / "dice.py"
    plugin.write_text(
        "import random, sys\n"
        "from tutelage.rewards.contract import register_reward\n"
        "register_reward('dice')(lambda answer: random.random() + ('torch' in sys.modules))\n"
    )
    one, other = drawn(noise(1, 8, 8)), drawn(255 - noise(1, 8, 8))
    first, second, again = judged(RewardPool({"dice": RewardSpec("dice")}, [str(plugin)]), one, other, one)
    assert first.reward == again.reward != second.reward
    assert first.reward is not None
    assert first.reward < 1


# --- a service --------------------------------------------------------------------------------------------------------


class Service(BaseHTTPRequestHandler):
    """Scores an image by its mean brightness; other prompts make it misbehave."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"] == "hang":
            self.server.release.wait()  # type: ignore[attr-defined]
        if asked["prompt"] == "mean":
            image = Image.open(io.BytesIO(base64.b64decode(asked["image"])))
            reply = json.dumps({"score": float(np.asarray(image).mean()), "ignored": asked["ground_truth"]})
        else:
            reply = asked["text"]
        status, _, code = asked["prompt"].partition(" ")
        self.send_response({"fail": 500, "redirect": int(code or 0)}.get(status, 200))
        if status == "redirect":
            self.send_header("Location", "/elsewhere")
        self.end_headers()
        with suppress(ConnectionError):  # long ones are not read to their end
            self.wfile.write(reply.encode())

    def do_GET(self) -> None:
        self.server.visited.append(self.path)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"score": 1}')

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def visited() -> list[str]:
    """What was asked for with GET."""
    return []


@pytest.fixture
def url(visited: list[str]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.release = threading.Event()  # type: ignore[attr-defined]
    server.visited = visited  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/score"
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_service_sees_the_image_itself(url: str, channels: int) -> None:
    image = noise(channels, 5, 7)
    answer = Answer("mean", "", "x", media=Media(image.tobytes(), image.shape))
    assert http_scorer(answer, url=url) == pytest.approx(image.mean())


def test_text_is_scored_too(url: str) -> None:
    assert http_scorer(Answer("echo", '{"score": 3}'), url=url) == 3.0


@pytest.mark.parametrize(
    "reply", ["", "0.5", "null", "[1]", "{}", '{"score": "1"}', '{"score": true}', '{"score": null}', "<html>"]
)
def test_a_bad_reply_is_a_failure_that_shows_it(url: str, reply: str) -> None:
    with pytest.raises(RuntimeError, match="expected JSON like") as raised:
        http_scorer(Answer("echo", reply), url=url)
    assert repr(reply)[1:-1] in str(raised.value)


def test_failures_of_the_service_are_counted_and_never_zero(url: str) -> None:
    pool = RewardPool({"service": RewardSpec("http_scorer", timeout=4.0, options={"url": url})})
    asked = [Answer("fail", "overloaded"), Answer("echo", '{"score": NaN}'), Answer("hang", ""), Answer("echo", "no")]
    verdicts = judged(pool, *asked, Answer("echo", '{"score": 0.25}'))
    assert [verdict.reward for verdict in verdicts] == [None] * 4 + [0.25]
    assert "status 500: 'overloaded'" in str(verdicts[0].failure)
    counted = {name: count for name, count in pool.counts.items() if count}
    assert counted == {"scored": 1, "raised": 2, "not_finite": 1, "timed_out": 1, "restarted": 1}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(url: str, visited: list[str], code: int) -> None:
    with pytest.raises(RuntimeError, match=rf"status {code}, a redirect to '/elsewhere'; .*set url to where"):
        http_scorer(Answer(f"redirect {code}", ""), url=url)
    assert visited == []


def test_a_reply_is_read_up_to_a_megabyte(url: str) -> None:
    filled = '{"score": 0.5, "why": "%s"}'
    assert http_scorer(Answer("echo", filled % ("x" * 1_000_000)), url=url) == 0.5
    with pytest.raises(RuntimeError, match="answered with more than 1048576 bytes"):
        http_scorer(Answer("echo", filled % ("x" * 4_000_000)), url=url)


def test_nobody_listens_is_a_failure() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.server_close()
    with pytest.raises(RuntimeError, match="could not be reached"):
        http_scorer(Answer("echo", "{}"), url=url)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "localhost:80", "http://", 5])
def test_other_addresses_are_refused_before_the_run(url: Any) -> None:
    with pytest.raises(UserError, match="url must look like"):
        judged(RewardPool({"service": RewardSpec("http_scorer", options={"url": url})}))


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("OPEN", 1.0), ("o p e n", 1.0), ("", 0.0), ("opn", 0.75), ("oxen", 0.75), ("an open door", 0.0), ("zzzz", 0.0)],
)
def test_similarity(text: str, value: float) -> None:
    assert ocr.similarity(text, "Open") == value


def test_a_missing_ocr_model_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"'\.\[ocr\]'"):
        ocr.check_options()


def test_ocr_reads_a_picture() -> None:
    from PIL import ImageDraw, ImageFont

    sign = Image.new("RGB", (256, 96), "white")
    ImageDraw.Draw(sign).text((20, 20), "OPEN", "black", ImageFont.load_default(48))
    image = np.ascontiguousarray(np.asarray(sign).transpose(2, 0, 1))
    assert ocr.ocr(drawn(image, "open")) == 1.0
    assert ocr.ocr(drawn(image, "shut")) < 0.5
