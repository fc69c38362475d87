"""``minigpt explain cache``: what it says of a step is what the cache did, and what the model computed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from minigpt import GPT, Sampling, generate
from minigpt.bench import work_per_character
from minigpt.explain.cached_steps import Step, WatchedCache, steps
from tests.cli_support import RECEPTIVE_FIELD, TEXT, Terminal, run, trained_checkpoint, unstyled

SVG = "{http://www.w3.org/2000/svg}"
# Of the model of `cli_support`.
WINDOW, N_LAYER = 16, 2
PROMPT = TEXT[:WINDOW]


# What a step is


@pytest.fixture(scope="module")
def walked(tiny_model: GPT) -> list[Step]:
    """Nine steps of a model with a window of 4 and a receptive field of 10, from 3 ids on."""
    return list(steps(tiny_model, [1, 2, 3], 9))


def test_with_the_cache_each_step_after_the_first_computes_one_position(walked: list[Step]) -> None:
    assert [step.cached.computed for step in walked] == [range(3), *(range(n, n + 1) for n in range(3, 11))]
    assert [step.recomputed.computed for step in walked] == [range(max(0, n - 10), n) for n in range(3, 12)]
    for step in walked:
        for done in (step.cached, step.recomputed):
            assert done.q_shape == (1, 2, len(done.computed), 6)
            assert done.kv_shape == (1, 2, len(done.read), 6)
            assert done.logit_rows == len(done.computed)


def test_a_position_is_stored_in_its_slot_of_the_ring_of_every_layer_and_evicts_the_one_a_window_before(
    walked: list[Step],
) -> None:
    for step, position in zip(walked[1:], range(3, 11), strict=True):
        assert len(step.rings) == 3
        for ring in step.rings:
            assert ring.written == ((position % 4, position),)
            assert ring.evicted == (((position % 4, position - 4),) if position >= 4 else ())
            assert sorted(ring.read) == list(range(max(0, position - 3), position + 1))
            # A single query is given the ring as it lies.
            assert ring.read == tuple(held for held in ring.held if held is not None)
        assert step.cached.read == tuple(sorted(step.rings[0].read))
        assert step.recomputed.read == tuple(step.recomputed.computed)


def test_of_a_prompt_longer_than_the_ring_the_newest_positions_are_stored(tiny_model: GPT) -> None:
    first, second = steps(tiny_model, [1, 2, 3, 4, 5, 6], 2)
    assert first.rings[0].read == (0, 1, 2, 3, 4, 5)
    assert first.rings[0].written == ((0, 4), (1, 5), (2, 2), (3, 3))
    assert first.rings[0].evicted == ()
    assert first.rings[0].held == (4, 5, 2, 3)
    assert second.rings[0].evicted == ((2, 2),)
    assert second.rings[0].held == (4, 5, 6, 3)


def test_what_no_prediction_can_see_is_not_read(tiny_model: GPT) -> None:
    long, short = ([0] * more + [1, 2, 3, 4, 5, 6, 5, 4, 3, 2] for more in (7, 0))
    assert [step.cached_id for step in steps(tiny_model, long, 4)] == [
        step.cached_id for step in steps(tiny_model, short, 4)
    ]
    assert [step.recomputed.computed for step in steps(tiny_model, long, 3)] == [range(n, n + 10) for n in range(3)]


def test_a_ring_that_holds_something_else_is_seen(tiny_model: GPT) -> None:
    kv_cache = WatchedCache(tiny_model)
    with torch.inference_mode():
        tiny_model(torch.tensor([[1, 2, 3, 4]]), kv_cache)
        assert kv_cache.moves[0].held == (0, 1, 2, 3)
        # Two positions change places in the first layer, and one is lost in the second.
        for ring in (kv_cache.keys, kv_cache.values):
            ring[0, :, :, [1, 2]] = ring[0, :, :, [2, 1]]
            ring[1, :, :, 3] = 0
        with pytest.raises(KeyError):
            tiny_model(torch.tensor([[5]]), kv_cache)
    assert kv_cache.moves[0].held == (4, 2, 1, 3)
    assert kv_cache.moves[0].read == (4, 2, 1, 3)
    assert len(kv_cache.moves) == 1


def test_a_watched_cache_is_a_cache(tiny_model: GPT) -> None:
    watched, plain = WatchedCache(tiny_model), tiny_model.new_cache()
    with torch.inference_mode():
        for ids in ([1, 2, 3], [4], [5, 6, 1, 2, 3], [4], [5]):
            assert torch.equal(tiny_model(torch.tensor([ids]), watched), tiny_model(torch.tensor([ids]), plain))
    assert torch.equal(watched.keys, plain.keys)
    assert watched.length == plain.length


def test_both_write_what_generate_writes_and_their_logits_agree(tiny_model: GPT, walked: list[Step]) -> None:
    expected = [id_ for (id_,) in generate(tiny_model, [1, 2, 3], 9, sampling=Sampling(0.0))]
    assert [step.cached_id for step in walked] == expected
    assert [step.recomputed_id for step in walked] == expected
    gaps = [step.logit_gap for step in walked]
    # In float64, and not nothing: the sums are done in another order.
    assert 0 < max(gaps) < 1e-12


def test_the_likeliest_id_of_the_recorded_pass_is_the_one_that_is_written(tiny_model: GPT, walked: list[Step]) -> None:
    ids = [1, 2, 3]
    for step in walked:
        with torch.inference_mode():
            logits = tiny_model(torch.tensor([ids]))[0, -1]
        assert step.cached_id == int(logits.argmax())
        ids.append(step.cached_id)


def test_the_bytes_are_those_of_keys_and_values_for_every_query_that_reads_them(walked: list[Step]) -> None:
    # Float64, a key and a value, 12 channels, 3 layers.
    row = 8 * 2 * 12 * 3
    made = {"cached": 0, "recomputed": 0}
    read = {"cached": 0, "recomputed": 0}
    for step, end in zip(walked, range(3, 12), strict=True):
        computed = {"cached": 3 if end == 3 else 1, "recomputed": min(end, 10)}
        for way, number in computed.items():
            done = getattr(step, way)
            made[way] += number * row
            if way == "cached" and end > 3:
                read[way] += min(end, 4) * row
            else:
                read[way] += sum(min(i + 1, 4) for i in range(number)) * row
            assert (done.made_bytes_so_far, done.read_bytes_so_far) == (made[way], read[way])


def test_the_work_is_that_of_the_bench_and_sums_up(tiny_model: GPT, walked: list[Step]) -> None:
    config = tiny_model.config
    totals = [0, 0]
    for step, position in zip(walked, range(2, 11), strict=True):
        again = work_per_character(config, position, cached=False)
        once = work_per_character(config, position, cached=True) if position > 2 else again
        totals = [totals[0] + once, totals[1] + again]
        assert (step.cached.work, step.recomputed.work) == (once, again)
        assert [step.cached.work_so_far, step.recomputed.work_so_far] == totals


def test_one_id_is_a_prompt_too(tiny_model: GPT) -> None:
    first, second = steps(tiny_model, [1], 2)
    assert first.cached.computed == first.recomputed.computed == range(1)
    assert first.cached.work == first.recomputed.work
    assert second.recomputed.computed == range(2)


# The command

own_run = pytest.mark.usefixtures("own_run")


@own_run
def test_the_shown_numbers_are_those_of_the_json() -> None:
    shown = run("explain", "cache", "--prompt", PROMPT, "-n", "3").stdout
    told = run("explain", "cache", "--prompt", PROMPT, "-n", "3", "--json").json
    assert (told["window"], told["receptive_field"], len(told["steps"])) == (WINDOW, RECEPTIVE_FIELD, 3)
    blocks = re.split(r"^step \d+ ", shown, flags=re.MULTILINE)[1:]
    for step, block in zip(told["steps"], blocks, strict=True):
        for name, part in (
            ("multiply-adds", "multiply_adds"),
            ("bytes made", "bytes_made"),
            ("bytes read", "bytes_read"),
        ):
            expected = [f"{step[way][part + end]:,}" for way in ("cached", "recomputed") for end in ("", "_so_far")]
            assert re.search(rf"^{name} +(.*)$", block, re.MULTILINE)[1].split() == expected  # type: ignore[index]
        for way in ("cached", "recomputed"):
            assert f"({', '.join(map(str, step[way]['q_shape']))})" in block
            assert f"({', '.join(map(str, step[way]['kv_shape']))})" in block
    assert "evicted           0 from slot 0 " in blocks[1]
    assert told["steps"][1]["cached"]["rings"][0]["evicted"] == [{"slot": 0, "position": 0}]
    assert [ring["layer"] for ring in told["steps"][1]["cached"]["rings"]] == [1, 2]
    assert told["same_text"] is True
    assert f"both wrote {told['text']!r}" in shown
    assert f"{told['steps'][-1]['logit_gap']:.1e} in the last step, {told['largest_logit_gap']:.1e} in all" in shown
    assert 0 < told["largest_logit_gap"] < 1e-4


@own_run
def test_the_drawn_ring_holds_the_characters_of_the_newest_positions() -> None:
    told = run("explain", "cache", "--prompt", PROMPT, "-n", "3", "--json").json
    shown = run("explain", "cache", "--prompt", PROMPT, "-n", "3").stdout
    text = (PROMPT + told["text"]).translate({ord(" "): "␣", ord("\n"): "↵"})
    rings = re.findall(r"^slots +0 \|(.*)\|\n {11}(.*)$", shown, re.MULTILINE)
    assert rings == [
        (text[:16], "+" * 16),
        (text[16] + text[1:16], "x"),
        (text[16:18] + text[2:16], " x"),
    ]


@own_run
def test_the_default_prompt_shows_how_the_ring_fills_and_evicts() -> None:
    told = run("explain", "cache", "--json").json
    assert len(told["prompt"]) == WINDOW - 2
    assert [len(step["cached"]["rings"][0]["evicted"]) for step in told["steps"]] == [0, 0, 0, 1, 1]
    assert "Nothing was evicted" not in run("explain", "cache").stdout
    assert "harbour" in run("explain", "cache").stderr


@own_run
def test_a_short_prompt_says_how_eviction_is_seen() -> None:
    shown = " ".join(run("explain", "cache", "-p", "OLE:", "-n", "2").stdout.split())
    assert "Nothing was evicted, for the ring of 16 slots" in shown
    assert "more than 16 characters in all" in shown


@own_run
def test_the_queries_are_counted_and_not_asserted() -> None:
    shown = " ".join(run("explain", "cache", "-p", PROMPT, "-n", "4").stdout.split())
    assert "In step 4 the recompute made 19 queries a layer and gave 19 rows of logits" in shown
    assert "The pass with the cache made 1 and gave 1." in shown
    assert "(2, 1, 2, 16, 16) of each" in shown


@own_run
@pytest.mark.parametrize("columns", [40, 60, 80, 250])
def test_it_fits_every_width_in_a_pipe_without_codes(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = run("explain", "cache", "-p", PROMPT * 3, "--checkpoint", "harbour").stdout
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    # Beside each other, or after each other.
    assert len(re.findall(r"with the cache +by recompute", shown)) == (5 if columns >= 80 else 0)
    assert len(re.findall(r"^- by recompute$", shown, re.MULTILINE)) == (0 if columns >= 80 else 5)


@own_run
def test_on_a_terminal_it_stresses_without_colours() -> None:
    terminal = Terminal("explain", "cache", "--checkpoint", "harbour", "-p", PROMPT, "-n", "2")
    assert terminal.finish() == 0
    assert set(re.findall(r"\x1b\[[0-9;]*m", terminal.screen)) == {"\x1b[0m", "\x1b[1m", "\x1b[1;7m"}
    assert "why no old query is ever read" in unstyled(terminal.screen)


@own_run
def test_of_a_prompt_beyond_the_receptive_field_the_rest_is_read_and_that_is_said() -> None:
    done = run("explain", "cache", "-p", TEXT[:100], "-n", "1", "--json")
    assert done.json["prompt"] == TEXT[100 - RECEPTIVE_FIELD : 100]
    assert "of the text's 100 characters the last 31 are read" in done.stderr


@own_run
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "OLE 漢"), "'漢' at 4"),
        (("--checkpoint", "nowhere"), "'nowhere'"),
        (("--save", "cache.pdf"), ".svg, .png or .html"),
        (("--save", "no/cache.svg"), "there is no folder 'no'"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(options: tuple[str, ...], sentence: str) -> None:
    if "--checkpoint" not in options:
        options = (*options, "--checkpoint", "harbour")
    assert sentence in run("explain", "cache", *options, code=1).error


@own_run
def test_the_picture_has_the_sums_of_both_ways() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    told = run("explain", "cache", "-p", PROMPT, "-n", "4", "--save", "cache.svg", "--json").json
    root = ElementTree.parse("cache.svg").getroot()
    for name, parts in (
        ("work", ("multiply_adds_so_far",)),
        ("bytes", ("bytes_made_so_far", "bytes_read_so_far")),
    ):
        heights: list[float] = []
        values: list[float] = []
        for way in ("cached", "recomputed"):
            (group,) = [group for group in root.iter(f"{SVG}g") if group.get("id") == f"{name}-{way}"]
            path = next(group.iter(f"{SVG}path")).get("d", "")
            heights += [float(y) for _, y in re.findall(r"[ML] (\S+) (\S+)", path)]
            values += [sum(step[way][part] for part in parts) for step in told["steps"]]
        assert len(heights) == len(values) == 8
        # One linear scale for both ways, from 0 up; SVG counts downwards.
        scale = (heights[0] - heights[-1]) / (values[-1] - values[0])
        for height, value in zip(heights, values, strict=True):
            assert height == pytest.approx(heights[0] - (value - values[0]) * scale, abs=0.01)


@own_run
def test_the_page_has_the_picture_the_steps_and_the_json() -> None:
    pytest.importorskip("matplotlib", reason="draws with matplotlib")
    told = run("explain", "cache", "-p", PROMPT, "-n", "4", "--save", "cache.html", "--json").json
    page = Path("cache.html").read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="data">(.*)</script>', page)
    assert embedded is not None
    assert json.loads(embedded[1]) == told
    assert "<svg" in page
    assert len(re.findall(r"<tr><td>", page)) == 4
    assert f"<td>{told['steps'][-1]['recomputed']['multiply_adds_so_far']:,}</td>" in page
    assert not re.search(r'(src|href)="(?!#)', page.replace("xlink:href", "href"))


def test_the_model_is_left_as_it_was() -> None:
    model = trained_checkpoint().model
    before = {name: param.clone() for name, param in model.named_parameters()}
    list(steps(model, [1, 2, 3], 2))
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert all(not block.attn.read._forward_hooks for block in model.blocks)


def test_no_more_steps_are_shown_than_anyone_reads() -> None:
    assert "500" in run("explain", "cache", "-n", "501", code=2).usage
