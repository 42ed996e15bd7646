"""Names and messages are escaped: no text for people contains anything that a terminal interprets."""

import contextlib
import json
import logging
import sys
import unicodedata

import pytest
import torch

import fastguard
from fastguard._text import listed, prose, shown
from fastguard.commands import cli
from fastguard.diagnosis import Finding
from fastguard.errors import NonFiniteGradientsError, UnsupportedTensorError
from fastguard.records.samples import WeightStats
from fastguard.report import build_report
from fastguard.sinks import JsonlSink

from made_runs import activity, with_bad_steps
from records import make_bad_record, make_record

# Characters that move cursors, colour, clear, hide or reverse text somewhere, one of each kind.
ODD = "\0\a\b\t\n\v\f\r\x1b\x7f\x80\x85\x9b\x9d\x9f\xa0\xad\u061c\u115f\u180e\udc9b\ud800\ue000\ufeff\ufff9"
ODD += "\uffff\U000e0001\U0010ffff"
ODD += "".join(map(chr, (*range(0x200B, 0x2010), *range(0x2028, 0x202F), *range(0x2060, 0x2070))))
NASTY = [
    *ODD,
    "\x1b]0;owned\x07",
    "\x1b[2J\x1b[H",
    "\x1b]8;;http://x\ahere\x1b]8;;\a",
    "x\nHEALTHY after 9 steps: no problems found",
    "e\u0301\u0301\u0301",
    "\u05d0\u05d1",
    "\u91cd",
]


def check_plain(text, *, lines=True):
    """Printable ASCII, with line ends of our own at most."""
    assert text.isascii(), ascii(text)
    assert all(line.isprintable() for line in (text.split("\n") if lines else [text])), ascii(text)


class TestShown:
    def test_is_printable_ascii_and_reads_back(self):
        for text in NASTY:
            check_plain(shown(text), lines=False)
            assert ascii(text)[1:-1] == shown(text) == shown(shown(text))
        odd = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i))[0] in "CZ" and i != 32]
        check_plain(shown("".join(odd)), lines=False)
        plain = "layers.0.attn.weight"
        assert shown(plain) is plain

    def test_prose_and_lists_have_an_end(self):
        assert len(prose("a b " * 10**5)) == 1600
        assert len(prose("in " + "a" * 10**5)) == 203
        assert len(listed(["\x1b" * 10**5] * 9)) < 300 and listed(["a\n", "b"]) == "a\\n, b"


WORST = {
    "all of them": "".join(NASTY),
    "a forged line": "x\nHEALTHY after 9 steps: no problems found",
    "long": "n" * 100_000,
    "many words": "two words " * 10_000,
}


@pytest.fixture(params=WORST.values(), ids=WORST.keys())
def nasty(request):
    return f"block.{request.param}.weight"


def nasty_history(name):
    """A history with the name wherever there can be one."""
    history = with_bad_steps(100, {}, names=[name])
    sampled = {
        "activations": (activity(name, name, zero=1.0, dead=1.0, infs=1),),
        "weights": (WeightStats(name, 64, 4.0, 0.5, 2.0, 1.0, 0.0, 1),),
    }
    for step in range(100, 160, 20):
        history.add(make_record(step, loss=1.0, lr=1e-3, **sampled))
    history.add(make_bad_record(160, [name], names=[name, "b"], skipped=False))
    history.note_model(
        names=[name, "c"], not_in_optimizer=[name], initialization={name: (9.0, 0.1)}, dropout={name: 0.99}
    )
    return history


class TestReport:
    def test_escapes_names_for_people_only(self, nasty):
        finding = Finding(
            f"in {nasty}.", 1, 2, layers=(nasty,), evidence={nasty: nasty}, rule=nasty, recommendation=nasty
        )
        report = build_report(nasty_history(nasty), sinks_lost={nasty: 1}, findings=[finding])
        assert len(report.findings) > 5 and report.causes and report.modules and report.weights
        text = str(report)
        check_plain(text)
        lines = text.split("\n")
        assert max(map(len, lines)) <= 100 and len(lines) < 300
        assert sum(line.startswith(("HEALTHY", "WARNING", "CRITICAL")) for line in lines) == 1
        plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert [nasty] in [finding["layers"] for finding in plain["findings"]]
        assert plain["modules"][0]["module"] == plain["weights"][0]["parameter"] == nasty


class TestElsewhere:
    def test_messages_of_the_logger(self, nasty, caplog):
        with caplog.at_level(logging.INFO, "fastguard"):
            logging.getLogger("fastguard").warning("first in %r, then %s", nasty, nasty)
            logging.getLogger("fastguard").info(f"{nasty}")
        for message in caplog.messages:
            check_plain(message, lines=False)
            assert len(message) <= 1600

    def test_a_log_message_that_cannot_be_formatted_is_left_to_the_handler(self, capsys, monkeypatch):
        logger = logging.getLogger("fastguard")
        handler = logging.StreamHandler(sys.stderr)
        monkeypatch.setattr(logger, "propagate", False)  # pytest's own handler raises
        logger.addHandler(handler)
        try:
            logger.warning("%d steps", "no number")
        finally:
            logger.removeHandler(handler)
        assert "--- Logging error ---" in capsys.readouterr().err

    def test_errors(self, nasty):
        check_plain(str(NonFiniteGradientsError([1, 2], [nasty] * 20)), lines=False)
        check_plain(str(UnsupportedTensorError(0, "must be dense", nasty, nasty)), lines=False)
        stats = fastguard.tensor_stats([torch.ones(1)], names=[nasty])
        with pytest.raises(KeyError) as caught:
            stats[nasty + "x"]
        check_plain(caught.value.args[0], lines=False)

    def test_tables_of_the_toolkit(self, nasty):
        weight = torch.nn.Parameter(torch.ones(2, 3))
        check_plain(str(fastguard.check_initialization({nasty: weight, nasty + ".bias": torch.full((4,), torch.nan)})))

    def test_a_guarded_model(self, nasty, caplog):
        """The names of a live model: a module's may hold anything but dots."""
        model = torch.nn.Module()
        model.add_module(nasty.replace(".", ""), torch.nn.Linear(2, 2))
        (inner,) = model.children()
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        inner(torch.full((1, 2), torch.nan)).sum().backward()
        with caplog.at_level(logging.INFO, "fastguard"):
            optimizer.step()
        assert caplog.messages
        for text in (*caplog.messages, str(optimizer.guard.report())):
            check_plain(text)


class TestCommands:
    """Every command that reads a log, with such names, under such a name."""

    @pytest.fixture
    def log(self, tmp_path):
        name = WORST["all of them"].replace("/", "").replace("\0", "")[:60].encode("utf-8", "replace").decode()
        folder = tmp_path / f"x{name}"
        folder.mkdir()
        path = folder / f"run{name}.jsonl"
        with JsonlSink(path, tensors_every=1) as sink:
            sink.note({"names": [name, "b"], "without_gradient": [name]})
            for step in range(60):
                weights = (WeightStats(name, 64, 4.0, 0.5, 2.0, 1.0, 0.0, 1),)
                sampled = {"weights": weights, "activations": (activity(name, zero=1.0, dead=1.0, infs=1),)}
                bad = [name] if step in (7, 50) else []
                sink.write(make_bad_record(step, bad, [name, "b"], skipped=bool(bad), loss=1.0, **sampled))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": 60, name: 1, "loss": 2.0}) + "\n{\n")
        return path

    @pytest.mark.parametrize(
        "command",
        [["diagnose"], ["report", "-f"], ["preflight"]],
    )
    @pytest.mark.parametrize("what", ["the log", "no log", "an option"])
    def test_print_nothing_that_a_terminal_interprets(self, log, command, what, capsys, monkeypatch):
        if command[0] == "report":
            pytest.importorskip("plotly", reason="the page is an extra: pip install fastguard[report]")
        given = {"the log": log, "no log": log.with_name(log.name + "\x1b[2J")}
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        with contextlib.suppress(SystemExit):
            cli.main([*command, str(given.get(what, f"--{log.name}"))])
        out, err = capsys.readouterr()
        assert out or err
        check_plain(out)
        check_plain(err)
