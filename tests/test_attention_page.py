"""The page of ``explain attention`` in a real browser: it shows the weights that are in it, and asks nobody."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from minigpt.cli.explain.attention import weights_json
from minigpt.cli.explain.attention_page import PAGE
from minigpt.explain.attention import explain_attention
from minigpt.page import write_page
from tests.browser_support import browser, complaints, requests
from tests.cli_support import TEXT, run, trained, trained_checkpoint

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

# Longer than the window of 16, with two lines.
PROMPT = "MARGIT: The tide came\nOLE: Then who"
HOSTILE = "\"'</script><!--<b>&amp;\\\n\t\u2028café 漢字 \U0001f600 ${x} `"


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    checkpoint = trained_checkpoint()
    told = weights_json(PROMPT, explain_attention(checkpoint.model, checkpoint.tokenizer.encode(PROMPT)))
    parsed: dict[str, Any] = json.loads(json.dumps(told))
    return parsed


@pytest.fixture
def page(chrome: Chrome, tmp_path: Path) -> Iterator[Chrome]:
    """The browser with the page of the prompt; at the end it must have had nothing to complain of, nor to ask for."""
    file = tmp_path / "page.html"
    done = run("explain", "attention", "--checkpoint", trained(), "--prompt", PROMPT, "--save", file, "--json")
    assert done.json["prompt"] == PROMPT
    yield opened(chrome, file)
    assert complaints(chrome) == []
    assert requests(chrome, file.as_uri()) == [file.as_uri()]


def opened(chrome: Chrome, file: Path) -> Chrome:
    complaints(chrome)
    chrome.get(file.as_uri())
    return chrome


def all_of(chrome: Chrome, selector: str) -> list[WebElement]:
    found: list[WebElement] = chrome.find_elements("css selector", selector)
    return found


def one(chrome: Chrome, selector: str) -> WebElement:
    (element,) = all_of(chrome, selector)
    return element


def shown(chrome: Chrome) -> dict[int, tuple[float, list[str]]]:
    """Of each position in the table, the weight, and what its row says."""
    rows = chrome.execute_script(
        "return [...document.querySelectorAll('#reads tbody tr')].map(row =>"
        " [Number(row.dataset.position), Number(row.dataset.weight), [...row.cells].map(cell => cell.textContent)])"
    )
    return {position: (weight, cells) for position, weight, cells in rows}


def lit(chrome: Chrome) -> list[int]:
    """The positions that are highlighted."""
    return [int(span.get_attribute("data-position") or 0) for span in all_of(chrome, "#text .read")]


def choose(chrome: Chrome, layer: int, head: int) -> None:
    from selenium.webdriver.support.select import Select

    Select(one(chrome, "#layer")).select_by_value(str(layer))
    Select(one(chrome, "#head")).select_by_value(str(head))


def point_at(chrome: Chrome, position: int) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(chrome).move_to_element(one(chrome, f'#text [data-position="{position}"]')).perform()


def agrees(chrome: Chrome, told: dict[str, Any], layer: int, head: int, position: int) -> None:
    """Checks that the page shows exactly one row of the JSON."""
    (row,) = [each["weights"][position] for each in told["heads"] if (each["layer"], each["head"]) == (layer, head)]
    readable = range(max(0, position - 15), position + 1)
    assert lit(chrome) == list(readable)
    table = shown(chrome)
    assert sorted(table) == list(readable)
    assert {j: weight for j, (weight, _) in table.items()} == {j: row[j] for j in readable}
    for j, (weight, cells) in table.items():
        assert cells[0] == str(j)
        assert float(cells[2]) == pytest.approx(weight, abs=5.1e-5)
        assert float(cells[3].removesuffix(" %")) == pytest.approx(100 * weight, abs=0.051)
        assert float(cells[4]) == pytest.approx(1 / len(readable), abs=5.1e-5)
    weights = [weight for weight, _ in table.values()]
    assert weights == sorted(weights, reverse=True)


def test_the_page_opens_without_complaint_or_request_and_shows_the_last_character(
    page: Chrome, told: dict[str, Any]
) -> None:
    assert page.title == "What attention reads"
    assert json.loads(one(page, "#data").get_attribute("textContent") or "") == told
    agrees(page, told, 1, 1, len(PROMPT) - 1)
    assert len(all_of(page, "#maps button")) == 4


def test_choosing_a_layer_and_a_head_shows_its_weights(page: Chrome, told: dict[str, Any]) -> None:
    for layer, head in ((2, 1), (2, 2), (1, 2), (1, 1)):
        choose(page, layer, head)
        agrees(page, told, layer, head, len(PROMPT) - 1)
        pressed = one(page, '#maps [aria-pressed="true"]')
        assert (pressed.get_attribute("title") or "").startswith(f"layer {layer}, head {head}:")
    all_of(page, "#maps button")[2].click()
    agrees(page, told, 2, 1, len(PROMPT) - 1)
    assert (one(page, "#layer").get_attribute("value"), one(page, "#head").get_attribute("value")) == ("2", "1")


def test_pointing_at_a_character_lights_up_exactly_what_it_may_read(page: Chrome, told: dict[str, Any]) -> None:
    choose(page, 2, 2)
    for position in (0, 1, 15, 16, 30, 5):
        point_at(page, position)
        agrees(page, told, 2, 2, position)
        assert [span.get_attribute("data-position") for span in all_of(page, "#text .current")] == [str(position)]
        assert f"position {position} " in one(page, "#heading").text


def test_what_is_read_more_is_lighter(page: Chrome) -> None:
    point_at(page, 12)
    weights = {position: weight for position, (weight, _) in shown(page).items()}

    def lightness(position: int) -> float:
        colour = one(page, f'#text [data-position="{position}"]').value_of_css_property("background-color")
        red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
        return 0.299 * red + 0.587 * green + 0.114 * blue

    in_order = sorted(weights, key=lambda position: weights[position])
    lights = [lightness(position) for position in in_order]
    # To the rounding of a colour.
    assert all(after > before - 1 for before, after in itertools.pairwise(lights))
    assert lights[-1] > lights[0] + 40


def test_the_keyboard_walks_through_the_text(page: Chrome, told: dict[str, Any]) -> None:
    from selenium.webdriver import ActionChains, Keys

    last = len(PROMPT) - 1
    # One stop of the tabulator.
    assert [span.get_attribute("data-position") for span in all_of(page, '#text [tabindex="0"]')] == [str(last)]
    page.execute_script("document.querySelector('#text [tabindex=\"0\"]').focus()")
    for key, position in ((Keys.ARROW_LEFT, last - 1), (Keys.HOME, 0), (Keys.ARROW_LEFT, 0), (Keys.ARROW_RIGHT, 1)):
        ActionChains(page).send_keys(key).perform()
        agrees(page, told, 1, 1, position)


def test_a_tap_on_a_character_reads_it(page: Chrome, told: dict[str, Any]) -> None:
    page.execute_script("document.querySelector('#text [data-position=\"20\"]').click()")
    agrees(page, told, 1, 1, 20)


def test_pointing_at_a_cell_of_the_map_reads_its_row_and_says_its_weight(page: Chrome, told: dict[str, Any]) -> None:
    from selenium.webdriver import ActionChains

    canvas = one(page, "#map")
    cell = canvas.size["width"] / (len(PROMPT) + 1)

    def move(row: int, column: int) -> str:
        # From the middle of the picture; one cell of it is for the characters.
        x, y = ((place + 1.5) * cell - canvas.size["width"] / 2 for place in (column, row))
        ActionChains(page).move_to_element_with_offset(canvas, round(x), round(y)).perform()
        return one(page, "#cell").text

    weight = told["heads"][0]["weights"][20][10]
    chars = {position: PROMPT[position] for position in (3, 10, 20, 30)}
    assert move(20, 10) == f"position 20 ({chars[20]}) reads {weight:.4f} of position 10 ({chars[10]})."
    agrees(page, told, 1, 1, 20)
    later = f"position 20 ({chars[20]}) may not read position 30 ({chars[30]}), which is later."
    assert move(20, 30) == later
    older = f"position 30 ({chars[30]}) may not read position 3 ({chars[3]}), which is older than the window."
    assert move(30, 3) == older
    agrees(page, told, 1, 1, 30)


def test_lines_of_the_text_are_lines_of_the_page(page: Chrome) -> None:
    assert one(page, "#text").text == PROMPT.replace("\n", "\u21b5\n")


def test_any_characters_survive(chrome: Chrome, tmp_path: Path) -> None:
    checkpoint = trained_checkpoint()
    # What a page is made of, with the weights of any text of that length.
    length = len(HOSTILE)
    data = weights_json(HOSTILE, explain_attention(checkpoint.model, [i % 7 for i in range(length)]))
    write_page(tmp_path / "page.html", "</title>\"'<x>", PAGE.body, data, style=PAGE.style, script=PAGE.script)
    opened(chrome, tmp_path / "page.html")
    assert chrome.title == "</title>\"'<x>"
    spans = all_of(chrome, "#text [data-position]")
    texts = [span.get_attribute("textContent") for span in spans]
    assert texts == [{"\n": "\u21b5", "\t": "\u2192"}.get(char, char) for char in HOSTILE]
    for position in (0, 5, length - 1):
        point_at(chrome, position)
        agrees(chrome, json.loads(json.dumps(data)), 1, 1, position)
    assert complaints(chrome) == []


def test_a_long_text_works(chrome: Chrome, tmp_path: Path) -> None:
    prompt = TEXT[:300]
    arguments = ("--checkpoint", trained(), "--prompt", prompt, "--save", tmp_path / "page.html", "--json")
    told = run("explain", "attention", *arguments).json
    opened(chrome, tmp_path / "page.html")
    choose(chrome, 2, 1)
    for position in (299, 123):
        point_at(chrome, position)
        agrees(chrome, told, 2, 1, position)
    assert complaints(chrome) == []


def test_a_page_of_one_head_and_one_character_works(chrome: Chrome, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    arguments = ("--prompt", "M", "--layer", "2", "--head", "1", "--save", file, "--json")
    told = run("explain", "attention", "--checkpoint", trained(), *arguments).json
    opened(chrome, file)
    agrees(chrome, told, 2, 1, 0)
    assert "1 character:" in one(chrome, "#heading").text
    assert complaints(chrome) == []


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_letters_are_readable_and_nothing_runs_over_the_edge(page: Chrome, scheme: str, width: int) -> None:
    emulation = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", emulation)
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        body = one(page, "body")
        paper, ink = (
            [int(part) for part in re.findall(r"\d+", body.value_of_css_property(name))[:3]]
            for name in ("background-color", "color")
        )
        assert (sum(paper) > sum(ink)) is (scheme == "light")
        assert abs(sum(paper) - sum(ink)) > 500
        overflow = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.execute_script(overflow) == 0
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_has_no_outside_address() -> None:
    for part in (PAGE.body, PAGE.style, PAGE.script):
        assert not re.search(r"https?:|//[a-z]|url\(|src=|@import|fetch\(", part)
