from __future__ import annotations

from xml.etree import ElementTree

from tests.show.helpers import hostile_timeline, many_microbatches, simulated
from weft.show.svg import render_svg, write_svg

SPACE = "{http://www.w3.org/2000/svg}"


def test_every_instruction_is_a_box_at_its_time():
    timeline = simulated("1f1b", 2, 2, activation_bytes=1)
    root = ElementTree.fromstring(render_svg(timeline, timeline.program, width=1108))  # 1000 pixels for the step
    boxes = {box.find(f"{SPACE}title").text: box for box in root.iter(f"{SPACE}rect") if len(box)}
    assert sorted(boxes) == sorted(set(timeline.labels))
    for index, label in enumerate(timeline.labels):
        wanted = 96 + 1000 * timeline.start_s[index] / timeline.step_time_s
        assert abs(float(boxes[label].get("x")) - wanted) < 0.01
    colours = {label: box.get("fill") for label, box in boxes.items()}
    assert colours["F s0 mb 0"] == colours["F s1 mb 0"] != colours["F s0 mb 1"]
    assert colours["B s0 mb 0"] != colours["F s0 mb 0"]


def test_the_picture_is_bounded_and_says_what_is_left_out():
    timeline = many_microbatches(40, 400)
    text = render_svg(timeline, timeline.program, width=400, max_rows=4)
    assert "... 37 more" in text
    assert text.count("<rect") < 3 * 400 * 4


def test_hostile_names_stay_text(tmp_path):
    timeline = hostile_timeline()
    write_svg(tmp_path / "a.svg", timeline, timeline.program)
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert {element.tag.removeprefix(SPACE) for element in root.iter()} == {"svg", "title", "rect", "line", "text"}
