"""advise, leaks, inspect, replay and rehearse: against the program's own output, and its errors as
exceptions."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import pickle
import stat
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import shadow

import oomph
from oomph import notebook
from oomph.answers import Advice, Holder, Rehearsal, Replay
from oomph.binary import Output

RECORDED = shadow.REPOSITORY / "workloads" / "recorded"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> str:
    path = shadow.binary()
    monkeypatch.setenv("OOMPH_BINARY", path)
    return path


def own_words(program: str, *arguments: str) -> Any:
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, encoding="utf-8")
    return json.loads(done.stdout) if "json" in arguments else done.stdout.rstrip()


def drawn(answer: Any) -> "xml.Element":
    """The chart of an answer in a notebook, which must be well-formed."""
    page = xml.fromstring(answer._repr_html_())
    chart = page.find("{http://www.w3.org/2000/svg}svg")
    assert chart is not None
    # The text is that of the terminal, for all its < and &.
    assert "".join(page.findtext("pre") or "") == str(answer)
    return chart


def test_advice_of_an_oom(program: str) -> None:
    file = RECORDED / "oom_base.pickle.xz"
    advice = oomph.advise(file, top=3)
    (row,) = own_words(program, "advise", "--format", "json", str(file))["rows"]
    assert advice.raw == row
    assert str(advice) == own_words(program, "advise", "--top", "3", str(file))
    assert advice.exit_code == 0 and not advice.cannot_tell and advice.each == (advice,)
    assert (advice.recommended, advice.needed_now_bytes) == (
        row["recommended"],
        row["needed_now_bytes"],
    )
    assert (
        advice.confidence is not None and advice.confidence.verdict == row["confidence"]["verdict"]
    )
    assert advice.out_of_memory is not None
    assert advice.out_of_memory.requested_bytes == row["dead_end"]["requested_bytes"]
    assert [one.strategy for one in advice.tried] == [one["strategy"] for one in row["tried"]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        advice.recommended = "other"  # type: ignore[misc]
    bars = drawn(advice).findall("{http://www.w3.org/2000/svg}rect")
    assert 1 <= len(bars) <= notebook.MOST_BARS


def test_names_that_are_new_stay_in_raw() -> None:
    holder = {"site": "train.py:9 step", "bytes": 7, "blocks": 2, "share": 0.5}
    ended = {
        "requested_bytes": 5,
        "allocated_bytes": 6,
        "reserved_bytes": 8,
        "holders": [holder],
        "stream": 0,
    }
    advice = Advice._make(
        {"source": "x", "dead_end": ended, "tried": [], "colour": "red"}, Output("text\n", "", 0)
    )
    assert advice.out_of_memory is not None and advice.out_of_memory.holders == (
        Holder("train.py:9 step", 7, 2),
    )
    assert advice.raw["colour"] == "red" and advice.raw["dead_end"]["holders"][0]["share"] == 0.5
    # A field that this version of the program does not give is unknown.
    assert advice.needed_bytes is None and str(advice) == "text"


def test_snapshot_as_a_source(program: str) -> None:
    with lzma.open(RECORDED / "oom_base.pickle.xz") as file:
        snapshot = pickle.load(file)
    advice = oomph.advise(snapshot)
    assert advice.source == "snapshot.pickle"
    assert advice.recommended == oomph.advise(RECORDED / "oom_base.pickle.xz").recommended


def test_recording_without_history_is_an_answer(program: str) -> None:
    with lzma.open(RECORDED / "oom_base.pickle.xz") as file:
        snapshot = pickle.load(file)
    advice = oomph.advise({**snapshot, "device_traces": [[]]})
    assert advice.cannot_tell and advice.exit_code == 109 and "cannot tell" in str(advice)


def test_several_sources(program: str, tmp_path: Path) -> None:
    names = ("oom_base.pickle.xz", "leak_cycle.pickle.xz")
    for rank, name in enumerate(names):
        (tmp_path / f"rank{rank}.pickle.xz").write_bytes((RECORDED / name).read_bytes())
    ranks = oomph.inspect(tmp_path)
    assert [one.source for one in ranks.each] == ["rank0.pickle.xz", "rank1.pickle.xz"]
    needs = [one.raw["needs"]["bound"]["requested_bytes"] for one in ranks.each]
    assert ranks.raw["needs"]["bound"]["requested_bytes"] == max(needs)
    both = oomph.leaks([RECORDED / name for name in names], each=True, fail_on="never")
    assert [one.verdict for one in both.each] == ["cannot_tell", "steady"]


def test_leak_is_a_verdict(program: str) -> None:
    found = oomph.leaks(RECORDED / "leak_outputs.pickle.xz")
    assert found.exit_code == 105 and found.leaks and found.verdict == "leak"
    assert found.growers[0].bytes_per_step == found.raw["growers"][0]["bytes_per_step"] > 0
    assert [step.step for step in found.per_step] == list(range(6))
    assert notebook.BAD in xml.tostring(drawn(found), encoding="unicode")
    assert not oomph.leaks(RECORDED / "leak_cycle.pickle.xz").leaks


def test_inspection(program: str) -> None:
    found = oomph.inspect(RECORDED / "leak_outputs.pickle.xz", by="size", at="peak", top=4)
    assert found.peak is not None and found.peak.bytes == found.raw["peak"]["bytes"]
    assert [one.name for one in found.operations] == [
        one["name"] for one in found.raw["operations"]
    ]
    assert len(found.operations) == 4
    drawn(found)
    drawn(oomph.inspect("training", set={"batch": 1, "steps": 2}, seed=3))


def test_replay(program: str) -> None:
    replay = oomph.replay("training", ["caching", "direct"], limit="2GiB", set={"batch": 2})
    assert isinstance(replay, Replay) and [run.strategy for run in replay.runs] == [
        "caching",
        "direct",
    ]
    assert replay.runs[0].ooms == 1 and replay.runs[0].oom_step is not None
    assert "out of memory" in str(replay)
    assert notebook.BAD in xml.tostring(drawn(replay), encoding="unicode")


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: oomph.advise("missing.pickle"), "missing.pickle: no such file"),
        (lambda: oomph.leaks("training", steps_at="x"), "unexpected argument '--steps-at'"),
        (lambda: oomph.rehearse(["true"], card="nothing"), "unknown card 'nothing'"),
    ],
)
def test_errors_of_the_program(program: str, call: Any, message: str) -> None:
    with pytest.raises(oomph.OomphError) as caught:
        call()
    assert caught.value.exit_code == 2 and message in str(caught.value)
    assert not str(caught.value).startswith("error:")
    # The caller has no command line.
    assert "Usage:" not in str(caught.value) and "--help" not in str(caught.value)


def test_wrong_arguments(program: str) -> None:
    with pytest.raises(TypeError, match="the format is JSON"):
        oomph.advise("training", format="csv")
    with pytest.raises(ValueError, match="no source"):
        oomph.advise([])
    for wrong in (3, None, [3]):
        with pytest.raises(TypeError, match="is not a source: pass a path"):
            oomph.advise(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the command is empty"):
        oomph.rehearse("")
    with pytest.raises(ValueError, match="there is no card"):
        oomph.rehearse("python train.py", card=[])
    with pytest.raises(ValueError, match=r"write it like {'batch': \(1, 256\)}"):
        oomph.rehearse("python train.py {batch}", largest={"batch": 8})  # type: ignore[dict-item]


def test_tables(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = oomph.replay("training", "caching", set={"batch": 1, "steps": 2})
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        replay.to_pandas()
    monkeypatch.undo()
    pandas = pytest.importorskip("pandas")
    table = replay.to_pandas()
    assert isinstance(table, pandas.DataFrame)
    assert table["peak_reserved_bytes"].tolist() == [replay.runs[0].peak_reserved_bytes]


# ---- rehearse


def stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, answer: Optional[Dict[str, Any]], code: int
) -> Path:
    """A program that prints its arguments to a file, and exports an answer."""
    (folder / "answer").write_text(json.dumps(answer), encoding="utf-8")
    export = "open(sys.argv[sys.argv.index('--export-json') + 1], 'w').write"
    script = folder / "oomph"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\n"
        f"open({str(folder / 'arguments')!r}, 'w').write(json.dumps(sys.argv[1:]))\n"
        f"{export if answer else 'str'}(open({str(folder / 'answer')!r}).read())\n"
        f"print('the text')\n"
        f"sys.stderr.write('a warning\\nerror: what went wrong\\n')\nsys.exit({code})\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("OOMPH_BINARY", str(script))
    return folder / "arguments"


def rehearsed(**facts: Any) -> Dict[str, Any]:
    row = {
        "card": "24GiB",
        "total_bytes": 24 << 30,
        "verdict": "fits",
        "peak_reserved_bytes": 3 << 30,
    }
    return {**row, "peak_allocated_bytes": 2 << 30, "peak_card_bytes": 4 << 30, **facts}


def test_rehearsal_is_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        rehearsed(),
        rehearsed(card="8GiB", verdict="does_not_fit", oom={"step": 2, "request": 1 << 30}),
    ]
    arguments = stand_in(tmp_path, monkeypatch, {"rows": rows, "schema": 2}, 108)
    answer = oomph.rehearse(
        "python 'my train.py' {batch}", card=["24GiB", "8GiB"], largest={"batch": (1, 9)}, steps=3
    )
    words = json.loads(arguments.read_text())
    del words[words.index("--export-json") + 1]
    assert words == [
        *(
            "rehearse",
            "--export-json",
            "--answer-only",
            "--card",
            "24GiB,8GiB",
            "--largest",
            "batch=1..9",
            "--steps",
            "3",
        ),
        *("--", "python", "my train.py", "{batch}"),
    ]
    assert isinstance(answer, Rehearsal) and answer.card == "24GiB" and answer.exit_code == 108
    assert [one.verdict for one in answer.each] == ["fits", "does_not_fit"] and not answer.fits
    assert "a warning" in answer.output and str(answer) == "the text"
    drawn(answer)


def test_rehearsal_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, None, 2)
    with pytest.raises(oomph.OomphError) as caught:
        oomph.rehearse(["python", "x.py"])
    assert str(caught.value) == "what went wrong" and caught.value.exit_code == 2


def test_functions_that_cannot_be_called_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def local() -> None: ...

    for function in (local, lambda: None, Path(".").exists):
        with pytest.raises(oomph.OomphError, match="at the top level of a module"):
            oomph.rehearse(function)
    monkeypatch.setenv("OOMPH_REHEARSE_FOLDER", "here")
    with pytest.raises(oomph.OomphError, match="a rehearsal already"):
        oomph.rehearse(stand_in)


SCRIPT = """
import oomph

def train(batch=1):
    import torch
    print("batch", batch)
    torch.empty(batch << 30, dtype=torch.uint8, device="cuda")

if __name__ == "__main__":
    answer = oomph.rehearse(train, card="4GiB", largest={"batch": (2, 4)}, output="out")
    print(answer.verdict, answer.value, answer.peak_allocated_bytes >> 30, answer.output.count("batch 4"))
"""


def test_function_on_the_shadow_gpu(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = shadow.run(
        [sys.executable, "script.py"], tmp_path, shadow.environment(shadow.torch_site())
    )
    assert done.stdout == "fits 3 3 1\n"


@pytest.mark.parametrize(
    "value, text",
    [
        (None, ""),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (5 << 40, "5120 GiB"),
    ],
)
def test_sizes(value: Any, text: str) -> None:
    assert notebook.size(value) == text


def test_recorder_advises(program: str, tmp_path: Path) -> None:
    """Recorder.advise() asks about the file that it wrote."""
    from oomph.recording import Recorder

    recorder = Recorder(tmp_path, shown=tmp_path)
    with lzma.open(RECORDED / "oom_base.pickle.xz") as file:
        (tmp_path / "rank0.pickle").write_bytes(file.read())
    recorder._name = "rank0"
    assert recorder.advise(limit="1GiB").source == "rank0.pickle"
    assert os.listdir(tmp_path) == ["rank0.pickle"]
