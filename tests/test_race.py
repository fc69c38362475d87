"""Two processes that race: they write what `generate` writes, and nothing of them is left, however it ends."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from minigpt import Sampling, generate
from minigpt.config import DEFAULT_FORMAT
from minigpt.errors import RaceError
from minigpt.race import Race, cores, fair_threads
from minigpt.weights import round_weights
from tests.cli_support import as_in_a_shell, trained, trained_checkpoint
from tests.run_support import wait_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="kills by signals")

PROMPT = "OLE: Then who"
# Far more than is written before a test ends it.
ENDLESS = 10_000_000


def is_there(pid: int | None) -> bool:
    """Whether a process of that number is there, be it dead and not buried yet."""
    assert pid is not None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_both_write_what_generate_writes_and_take_their_own_times() -> None:
    checkpoint = trained_checkpoint()
    prompt = checkpoint.tokenizer.encode(PROMPT)
    with Race(trained() / "best.safetensors", 1) as race:
        pids = race.pids
        assert len(set(pids) | {os.getpid()}) == 3
        racer = race.meet()
        assert (racer.config, racer.chars) == (checkpoint.model.config, checkpoint.tokenizer.chars)
        assert (racer.start, racer.steps) == (checkpoint.start, checkpoint.facts.steps)
        assert race.elapsed_s == 0
        states = list(race.run(prompt, 120, Sampling(0.8), seed=5))
        elapsed_s = race.elapsed_s
    cached, recomputed = race.lanes
    assert (cached.cached, recomputed.cached) == (True, False)
    model = copy.deepcopy(checkpoint.model)
    round_weights(model, DEFAULT_FORMAT)
    expected = [id_ for (id_,) in generate(model, prompt, 120, sampling=Sampling(0.8), seed=5)]
    assert cached.ids == recomputed.ids == expected
    for lane in race.lanes:
        assert lane.finished
        assert len(lane.times_s) == 120
        assert lane.times_s == sorted(lane.times_s)
        assert lane.times_s[0] > 0
        assert lane.seconds == lane.times_s[-1] < elapsed_s
        assert lane.chars_per_s == pytest.approx(120 / lane.seconds)
    assert states[-1] == race.lanes
    assert not any(map(is_there, pids))


def test_a_race_that_is_left_ends_both_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Race(trained() / "best.safetensors", 1) as race:
        pids = race.pids
        race.meet()
        for lanes in race.run([0], ENDLESS, Sampling(), seed=0, interval_s=0.01):
            if all(lane.ids for lane in lanes):
                # What Ctrl-C does to the one that looks on; the two do not hear it.
                for pid in pids:
                    assert pid is not None
                    os.kill(pid, signal.SIGINT)
                seen = [len(lane.ids) for lane in lanes]
                break
        wait_until(lambda: all(len(lane.ids) > n for lane, n in zip(race.lanes, seen, strict=True)))
        raise KeyboardInterrupt
    assert not any(map(is_there, pids))


@pytest.mark.parametrize(("dies", "name"), [(0, "with the cache"), (1, "by recompute")])
def test_one_that_dies_is_a_sentence_and_the_other_one_ends(dies: int, name: str) -> None:
    sentence = rf"the process that writes {name} has ended too early \(signal 9\)"
    with pytest.raises(RaceError, match=sentence), Race(trained() / "best.safetensors", 1) as race:
        pids = race.pids
        race.meet()
        for lanes in race.run([0], ENDLESS, Sampling(), seed=0, interval_s=0.01):
            if lanes[dies].ids:
                victim = pids[dies]
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
    assert not any(map(is_there, pids))


def test_what_is_wrong_with_the_checkpoint_is_what_they_say_of_it(tmp_path: Path) -> None:
    with (
        pytest.raises(RaceError, match=r"there is no checkpoint file .*nothing"),
        Race(tmp_path / "nothing", 1) as race,
    ):
        pids = race.pids
        race.meet()
    assert not any(map(is_there, pids))


def test_both_end_when_the_one_that_started_them_is_killed() -> None:
    program = f"""
from pathlib import Path
from minigpt.race import Race
from minigpt.sampling import Sampling
if __name__ == "__main__":
    race = Race(Path({str(trained() / "best.safetensors")!r}), 1)
    race.meet()
    for lanes in race.run([0], {ENDLESS}, Sampling(), 0):
        if all(lane.ids for lane in lanes):
            print(*race.pids, flush=True)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=as_in_a_shell()["env"]) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(is_there, pids))
        parent.kill()
    wait_until(lambda: not any(map(_runs, pids)))


def _runs(pid: int) -> bool:
    """Whether it runs; a process without a parent may wait for its burial for as long as the system likes."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        return is_there(pid)
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_gets_half_of_the_cores_and_at_least_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= cores() <= (os.cpu_count() or 1)
    for there_are, each in ((1, 1), (2, 1), (3, 1), (4, 2), (16, 8)):
        monkeypatch.setattr("minigpt.race.cores", lambda there_are=there_are: there_are)
        assert fair_threads() == each


def test_the_module_needs_no_torch() -> None:
    program = "import sys, minigpt.race; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], **as_in_a_shell()).returncode == 0
