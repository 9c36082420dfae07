"""Recordings of a terminal as SVG."""

import sys
import xml.etree.ElementTree as ET

import pytest
from benchmarks.plot_demo import LAST, LONGEST, Frame, Screen, animation, record, shortened

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_is_rewritten_in_place():
    screen = Screen(columns=10)
    screen.write("one\n\x1b[?25l\x1b[1mstep 1\x1b[0m")
    screen.write("\r\x1b[2Kstep 22\n\x1b[1A\x1b[2K")
    assert screen.lines == ["one", "", ""]
    screen.write("\rabcdefghijkl")
    assert screen.lines == ["one", "abcdefghij", "kl"]


def test_pauses_are_cut_and_equal_screens_joined():
    frames = [Frame(0.0, ("$",)), Frame(30.0, ("$", "a")), Frame(30.01, ("$", "b")), Frame(31.0, ("$", "b"))]
    shown, length = shortened(frames)
    assert shown == [Frame(0.0, ("$",)), Frame(LONGEST, ("$", "b"))]
    assert length == pytest.approx(2 * LONGEST + 0.01 + LAST)


def test_the_last_screen_is_what_shows_without_animation():
    frames = [Frame(0.0, ("$ x", "1 < 2")), Frame(1.0, ("$ x", "done"))]
    root = ET.fromstring(animation(frames, 4.0, "x & y", 2))
    texts = {text.text: text.get("class") for text in root.iter(f"{SVG}text")}
    assert texts == {"x & y": "t", "$ x": None, "1 < 2": "g", "done": None}
    style = root.find(f"{SVG}style").text
    assert "25.000%{opacity:0}" in style  # Of the line that goes.
    assert "25.000%{opacity:1}" in style  # Of the one that comes.


@pytest.mark.processes
def test_a_command_runs_in_a_terminal():
    program = "import sys; print('é', sys.stdout.isatty())"
    assert record([sys.executable, "-c", program], "demo")[-1].lines[:2] == ("$ demo", "é True")
